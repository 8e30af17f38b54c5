"""A tiny exchange between the first COUNT devices of this machine: does each rank get its sums?

    python -m ess.engine.process.checks.exchange_check COUNT               prints one JSON line
    python -m ess.engine.process.checks.exchange_check COUNT RANK PORT     a rank, on device RANK

Each rank has all experts of a layer of the model in the box, and beside them its share; so it can
compute the expected sums. The memory that the exchange takes of the device is printed beside the
estimate that memory plans use. A rank that fails, or says nothing in time, is named with the last
line of its log, and all are ended.

NCCL's guide wants an exchange to be captured by all ranks or by none. Ranks that decode keep to
less: all queue the same exchanges, but each has graphs of its own, so one replays what another runs
eagerly. No part of NCCL that we use tells the two apart while it registers no memory of graphs.
Whether that holds on this machine is tried here: each rank in turn replays while the others do not,
then the others while it does not.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from ess import console
from ess.engine.process.lifeline import die_with_parent
from ess.errors import EssError, Unavailable
from ess.ports import kept_port

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ess.comm.group import Group

LIMIT_S: Final = 180.0
PATIENCE_S: Final = 60.0
TOKEN_COUNT: Final = 96
WORDS_MAX: Final = 300
RANK: Final = (sys.executable, "-m", "ess.engine.process.checks.exchange_check")
REPLAYS: Final = (
    "exchanges in which one rank replays a graph and another does not; `--graphs 0` does without"
)
TOLERANCE: Final = 1e-4
"""The tolerance in float32: ranks add experts up in another order than a single device does."""


class RankTrial(msgspec.Struct, frozen=True, kw_only=True):
    """`same`: also where one rank replays and another does not. `taken_bytes` of the device are for
    an exchange in bfloat16, as estimated."""

    same: bool
    taken_bytes: int
    estimated_bytes: int


class ExchangeTrial(msgspec.Struct, frozen=True, kw_only=True):
    """`wrong` are ranks with other sums; the bytes are of the rank that took the most."""

    count: int
    wrong: tuple[int, ...]
    taken_bytes: int
    estimated_bytes: int
    seconds: float


def trial(count: int, *, program: Sequence[str] = RANK, limit_s: float = LIMIT_S) -> ExchangeTrial:
    """Unavailable names a rank, its device and what was wrong."""
    began_s = time.monotonic()
    told = [msgspec.json.decode(line, type=RankTrial) for line in _told(count, program, limit_s)]
    return ExchangeTrial(
        count=count,
        wrong=tuple(rank for rank, each in enumerate(told) if not each.same),
        taken_bytes=max(each.taken_bytes for each in told),
        estimated_bytes=told[0].estimated_bytes,
        seconds=time.monotonic() - began_s,
    )


def _told(count: int, program: Sequence[str], limit_s: float) -> list[str]:
    """The last line of each rank; they end together."""
    ranks = list[subprocess.Popen[str]]()
    with kept_port("127.0.0.1") as port, ThreadPoolExecutor(count) as threads:
        try:
            for rank in range(count):
                ranks.append(_started([*program, *map(str, (count, rank, port))]))
            lines = [threads.submit(_line_of, *each) for each in enumerate(ranks)]
            done, silent = wait(lines, timeout=limit_s, return_when=FIRST_EXCEPTION)
            wrong = [error for each in lines if each in done and (error := each.exception())]
            if wrong:
                raise wrong[0]
            if silent:
                for process in ranks:
                    process.kill()
                raise _silence(lines, silent, limit_s)
            return [each.result() for each in lines]
        finally:
            for process in ranks:
                process.kill()


def _started(words: Sequence[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)


def _silence(lines: list[Future[str]], silent: set[Future[str]], limit_s: float) -> Unavailable:
    """Names the ranks, which have been killed, and says how far the first of them had come."""
    ranks = [rank for rank, each in enumerate(lines) if each in silent]
    last = str(lines[ranks[0]].exception()).partition(": ")[2]
    names = ", ".join(map(_name, ranks))
    return Unavailable(
        f"nothing after {limit_s:g} s from {names}; the last line of rank {ranks[0]}: {last}"
    )


def _line_of(rank: int, process: subprocess.Popen[str]) -> str:
    printed, fault = process.communicate()
    if process.returncode == 0 and (lines := printed.strip().splitlines()):
        return lines[-1]
    words = fault.strip().splitlines() or [f"nothing in its log, exit code {process.returncode}"]
    raise Unavailable(f"{_name(rank)} cannot exchange: {words[-1][:WORDS_MAX]}")


def _name(rank: int) -> str:
    return f"rank {rank} on cuda:{rank}"


# ---- a rank


def rank_trial(count: int, rank: int, port: int) -> RankTrial:
    import torch

    from ess.comm.processes.meeting import join_group

    die_with_parent()
    torch.set_num_threads(1)
    torch.cuda.set_device(rank)
    home = torch.device("cuda", rank)
    group = join_group(
        rank,
        count,
        init=f"tcp://127.0.0.1:{port}",
        team=count,
        timeout_s=PATIENCE_S,
        device=home,
        patience_s=PATIENCE_S,
    )
    exact, usual = _exchanged(group, home, "f32"), _exchanged(group, home, "bf16")
    group.close()
    return RankTrial(
        same=exact.difference <= TOLERANCE,
        taken_bytes=usual.taken_bytes,
        estimated_bytes=usual.estimated_bytes,
    )


class _Exchanged(NamedTuple):
    """`difference`: how far the sums are from those of this device alone."""

    difference: float
    taken_bytes: int
    estimated_bytes: int


def _exchanged(group: Group, home: torch.device, form: Literal["f32", "bf16"]) -> _Exchanged:
    import torch

    from ess.comm.experts.balance import balanced
    from ess.comm.experts.expert_ranks import Rooms
    from ess.comm.experts.fixed import FixedExpertRanks
    from ess.comm.experts.placement import Placement, Places
    from ess.door.device.memory.uploads import Download
    from ess.engine.process.checks.selfcheck import small_model
    from ess.engine.step_bytes import exchange_bytes

    whole = small_model(home, form=form)
    expert_count = whole.config.expert_count
    shares = balanced([1] * expert_count, group.size, -expert_count % group.size)
    places = Places(Placement(shares))
    expert_ranks = FixedExpertRanks(group.team, places, home, lambda tensor: Download(tensor).read)
    divided = small_model(home, form=form, expert_ranks=expert_ranks)
    alone, shared = (
        next(layer for layer in model.layers if layer.experts is not None)
        for model in (whole, divided)
    )
    expert_ranks.enter(0, Rooms(batch=TOKEN_COUNT))
    chance = torch.Generator().manual_seed(group.rank)
    hidden = torch.randn(TOKEN_COUNT, whole.config.residual_dim, generator=chance).to(home)
    with torch.inference_mode():
        wanted = alone.mlp(hidden)
        shared.mlp(hidden)  # kernels load, NCCL takes what it keeps
        torch.cuda.synchronize(home)
        torch.cuda.reset_peak_memory_stats(home)
        held_bytes = torch.cuda.memory_allocated(home)
        came = [shared.mlp(hidden)]
        torch.cuda.synchronize(home)
        taken_bytes = torch.cuda.max_memory_allocated(home) - held_bytes
        console.note(REPLAYS)
        came += _replayed_in_turn(group, home, lambda: shared.mlp(hidden))
    group.team.check()
    difference = max(float((each - wanted).abs().max()) for each in came)
    value_bytes = alone.mla.dtype.itemsize
    estimated_bytes = exchange_bytes(whole.config, TOKEN_COUNT, group.size, value_bytes=value_bytes)
    return _Exchanged(difference, taken_bytes, estimated_bytes)


def _replayed_in_turn(
    group: Group, home: torch.device, exchange: Callable[[], Tensor]
) -> list[Tensor]:
    """What this rank got of each exchange: `group.size` turns in which one rank captures and
    replays, then as many in which all but one replay."""
    import torch

    graph: Any = torch.cuda.CUDAGraph()
    came = list[torch.Tensor]()
    for turn in range(2 * group.size):
        is_first, is_own = turn < group.size, turn % group.size == group.rank
        if is_first and is_own:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                replayed = exchange()
        if is_first == is_own:
            graph.replay()
            came.append(replayed.clone())
        else:
            came.append(exchange())
        torch.cuda.synchronize(home)
    return came


def main(count: int, *of_rank: int) -> None:
    try:
        made = rank_trial(count, *of_rank) if of_rank else trial(count)
    except EssError as error:
        sys.exit(str(error))
    sys.stdout.write(msgspec.json.encode(made).decode() + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
