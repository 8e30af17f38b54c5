"""The process of an engine that shares the experts with others.

    python -m ess.engine.process.rank ENDPOINT...     (a Launch as one JSON line on stdin)

It joins its group, loads its share of the experts, waits until all ranks have loaded and then runs
as any engine process does. Fail-stop: when one rank is lost or wrong, all ranks end, and each tells
its own server why. The servers start them again, and they meet as at first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import torch

from ess import console
from ess.clock import Clock, RealClock
from ess.comm.experts.expert_ranks import ExpertRanks
from ess.comm.experts.fixed import FixedExpertRanks
from ess.comm.experts.loads import WINDOW_STEPS
from ess.comm.group import Group
from ess.comm.processes.meeting import join_group
from ess.door.device.memory.uploads import Download
from ess.engine.config import ProcessConfig
from ess.engine.devices import is_device, ordinal_of
from ess.engine.process.build import Built, build
from ess.engine.process.member import end_when, has_failed, main, membership
from ess.engine.process.messages import Launch
from ess.engine.process.wire import open_wire
from ess.engine.process.worker import serve
from ess.engine.ranks.agreement import Many
from ess.engine.ranks.placing import agreed_places, write_loads
from ess.errors import BadInput, Unavailable
from ess.models.weights.checkpoint import Checkpoint
from ess.models.weights.files.fingerprint import fingerprint

JOIN_S: Final = 120.0
LOAD_S: Final = 3600.0
GRACE_S: Final = 10.0
"""How long a rank whose group has ended may take to say so and to end."""
ALIKE: Final = ("mtp", "tbo", "sbo", "form", "backend", "dp_size", "redundant_experts")
"""Settings that all ranks must have in common: the order of the exchanges follows from them, and
the values that they carry. All other settings may differ from rank to rank."""
ALIKE_ON_DEVICES: Final = ("max_running", "chunk_tokens")
"""There an exchange takes as much memory as the largest batch and chunk of any rank ask for."""


def join(config: ProcessConfig, secret: str) -> Group:
    return join_group(
        config.dp_rank,
        config.dp_size,
        init=f"tcp://{config.dist_init_addr}",
        team=config.dp_size,
        timeout_s=JOIN_S,
        secret=secret.encode(),
        device=config.device,
        patience_s=config.stage_timeout_s,
    )


def expert_ranks_of(launch: Launch, group: Group) -> ExpertRanks:
    with Checkpoint(launch.model) as checkpoint:
        config = checkpoint.model_config
    if not config.expert_count:
        raise BadInput(f"dp_size is {group.size}, and a model of {config.family} has no experts")
    settings = launch.config
    places = agreed_places(
        group.team, config, redundant=settings.redundant_experts, path=loads_file(settings)
    )
    if is_device(settings.device):
        home = torch.device("cuda", ordinal_of(settings.device))
        return FixedExpertRanks(group.team, places, home, lambda tensor: Download(tensor).read)
    return ExpertRanks(group.team, places)


def loads_file(config: ProcessConfig) -> str:
    """The file to place experts by. A file that is also recorded need not exist at the first
    start."""
    path = config.expert_load
    is_yet_to_come = path == config.record_expert_load and not Path(path).exists()
    return "" if is_yet_to_come else path


def loaded(launch: Launch, group: Group, clock: Clock) -> Built:
    """Returns when all ranks have loaded the same model in the same way."""
    expert_ranks = expert_ranks_of(launch, group)
    record = recorder(launch.config, expert_ranks)
    ranks = Many(expert_ranks, on_meet=group.advance, on_census=record)
    names = ALIKE + (ALIKE_ON_DEVICES if is_device(launch.config.device) else ())
    meets = partial(greet, group, in_common(launch, names))
    return build(launch, clock, expert_ranks=expert_ranks, ranks=ranks, before_steps=meets)


def recorder(config: ProcessConfig, expert_ranks: ExpertRanks) -> Callable[[], None]:
    """Makes the function that writes the loads, if this is rank 0 and has a path. A failed write is
    reported and the rank continues. Loads of fewer steps than a window do not replace a file."""
    path = Path(config.record_expert_load)

    def record() -> None:
        if not config.record_expert_load or expert_ranks.team.rank:
            return
        if expert_ranks.loads.step_count < WINDOW_STEPS and path.exists():
            return
        try:
            write_loads(path, expert_ranks)
        except OSError as error:
            console.note(f"ess: record_expert_load {path} cannot be written: {error.strerror}")

    return record


def in_common(launch: Launch, names: Sequence[str]) -> dict[str, str]:
    """What ranks that meet compare: these settings, and the model."""
    settings = {name: str(getattr(launch.config, name)) for name in names}
    return settings | {"model": fingerprint(launch.model).hex()}


def greet(group: Group, mine: dict[str, str]) -> None:
    """Every rank sends its settings to rank 0, which compares them and lets all ranks begin.
    BadInput names the setting that differs."""
    if group.rank:
        group.reports[0].send(msgspec.json.encode(mine))
        if group.reports[0].receive(LOAD_S) is None:
            raise Unavailable(f"rank 0 has not started the group within {LOAD_S:g} s")
        return
    for rank, link in group.reports.items():
        frame = link.receive(LOAD_S)
        if frame is None:
            raise Unavailable(f"rank {rank} has not loaded within {LOAD_S:g} s")
        theirs = msgspec.json.decode(frame.head, type=dict[str, str])
        for name, value in mine.items():
            if theirs.get(name) != value:
                raise BadInput(f"{name} is {theirs.get(name)} on rank {rank}, {value} on rank 0")
    for link in group.reports.values():
        link.send(b"begin")


def run(launch: Launch, endpoints: list[str]) -> None:
    group = join(launch.config, launch.secret)
    if is_device(launch.config.device):
        end_when(partial(has_failed, group), grace_s=GRACE_S)
    clock = RealClock()
    with membership(group), open_wire(endpoints) as (wire, context):
        serve(launch, wire, clock, context, lambda *_: loaded(launch, group, clock))


if __name__ == "__main__":
    sys.exit(main(run, lambda launch: launch.config.dp_rank, sys.argv[1:]))
