"""How a process of a group begins and ends: with all others, or in order."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NoReturn

import msgspec
import torch

from ess.comm.group import Group
from ess.comm.link import LinkLost
from ess.comm.processes.meeting import join_group
from ess.engine.devices import is_device, ordinal_of
from ess.engine.process.lifeline import first_line, leave_objects
from ess.engine.process.messages import Launch, Rank
from ess.errors import BadInput, EssError

JOIN_S: Final = 120.0
LOOK_S: Final = 0.25


def rank_of(launch: Launch) -> Rank:
    """Checks the settings of a process that is one of several stages, or of a stage's team."""
    if launch.rank is None:
        raise BadInput("rank is missing: it says which stage of the pipeline this process is")
    rank, stage_count = launch.rank, len(launch.rank.layers)
    if rank.team < 1 or rank.size != stage_count * rank.team:
        raise BadInput(f"size is {rank.size} for {stage_count} stages of {rank.team} ranks each")
    return rank


def join(rank: Rank, secret: str) -> Group:
    """Joins the group. If tensors are on a device, that device is the process's own from here
    on."""
    if is_device(rank.device):
        torch.cuda.set_device(ordinal_of(rank.device))
    return join_group(
        rank.rank,
        rank.size,
        init=rank.init,
        team=rank.team,
        timeout_s=JOIN_S,
        generation=rank.generation,
        secret=secret.encode(),
        device=rank.device,
        patience_s=rank.stage_timeout_s,
    )


@contextmanager
def membership(group: Group) -> Iterator[None]:
    """An error of this rank ends the whole group, and the other ranks are sent the reason. Without
    an error this rank leaves the group in order."""
    try:
        yield
    except LinkLost:
        raise
    except BaseException as error:
        reason = _reason(error)
        group.fail(f"rank {group.rank} ends: {type(reason).__name__}: {reason}")
        raise
    group.close()


def end_when(is_over: Callable[[], bool], *, grace_s: float) -> None:
    """A thread ends this process `grace_s` after `is_over` turns true, unless the main thread has
    ended it before: that may compute a layer, or be in a call of NCCL that never returns."""

    def watch() -> None:
        while not is_over():
            time.sleep(LOOK_S)
        time.sleep(grace_s)
        os._exit(3)

    threading.Thread(target=watch, name="watch", daemon=True).start()


def has_failed(group: Group) -> bool:
    try:
        group.team.check()
    except EssError:
        return True
    return False


def main(
    run: Callable[[Launch, list[str]], None], rank_of: Callable[[Launch], int], endpoints: list[str]
) -> int:
    """A group that has failed is not left in order: its ranks would wait for one another. A thread
    inside NCCL would abort the interpreter's end, so with a device there is none."""
    launch = msgspec.json.decode(first_line(), type=Launch)
    try:
        run(launch, endpoints)
    except BaseException as error:
        _end(rank_of(launch), error)
    if is_device(launch.config.device):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    leave_objects()
    return 0


def _reason(error: BaseException) -> BaseException:
    """What loading has refused, where that ends the process (`worker.serve`)."""
    return error.__cause__ or error if isinstance(error, SystemExit) else error


def _end(rank: int, error: BaseException) -> NoReturn:
    reason = _reason(error)
    if isinstance(reason, EssError):
        sys.stderr.write(f"rank {rank} ends: {reason}\n")
    else:
        traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)
