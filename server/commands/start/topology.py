"""From settings to the processes of an engine: one, or the ranks of a prefill worker's stages.

Stages divide the layers, the members of a stage's team the heads or the tokens. All processes get
the same `Rank` with different numbers; each start of the worker is a new generation, and on one
machine it also meets at a new address. On several machines the address stays, and the generation is
0: the store at that address, with all its entries, ends with rank 0.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import msgspec

from ess.engine.chunking.partition import counted_costs, partition, read_partition
from ess.engine.devices import devices_here, is_device
from ess.engine.process.messages import Launch, Rank
from ess.layout import ModelLayout
from ess.models.config import ModelConfig
from ess.ports import kept_port
from ess.server.commands.start.settings import Settings
from ess.server.commands.start.torchrun import cleaned
from ess.server.process.engines.group import EngineGroup

HERE: Final = "127.0.0.1"
HUGE_PAGES: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""The C library asks for huge pages where it has 2 MiB to ask for."""


def layers_of(
    settings: Settings, layout: ModelLayout, config: ModelConfig
) -> tuple[tuple[int, int], ...]:
    """The main layers of each stage; empty for an engine without stages."""
    if not settings.is_staged:
        return ()
    text = settings.pp_layer_partition
    given = read_partition(text) if text else None
    parts = partition(layout, settings.pp_size, given=given, costs=counted_costs(config))
    return tuple((part.start, part.stop) for part in parts)


def ranks_here(settings: Settings) -> range:
    """The ranks that this process starts."""
    if settings.only_rank is not None:
        return range(settings.only_rank, settings.only_rank + 1)
    first = first_here(settings)
    return range(first, first + settings.world_size // settings.nnodes)


def first_here(settings: Settings) -> int:
    """The first rank of this machine."""
    return settings.node_rank * (settings.world_size // settings.nnodes)


def launches_of(
    settings: Settings,
    launch: Launch,
    layers: Sequence[tuple[int, int]],
    generation: int,
    address: str,
) -> list[Launch]:
    """The Launch of each process on this machine. Ranks meet at the address."""
    if not layers:
        return [launch]
    whole = Rank(
        rank=0,
        size=settings.world_size,
        init=f"tcp://{address}",
        layers=tuple(layers),
        generation=0 if settings.dist_init_addr else generation,
        team=settings.team_size,
        dynamic=settings.dynamic_chunking,
        smoothing=settings.smooth,
        stage_timeout_s=settings.stage_timeout_s,
    )
    devices, first = devices_here(settings), first_here(settings)
    ranks = (
        msgspec.structs.replace(whole, rank=rank, device=devices[rank - first])
        for rank in ranks_here(settings)
    )
    return [msgspec.structs.replace(launch, rank=rank) for rank in ranks]


def starter(
    settings: Settings,
    launch: Launch,
    layers: Sequence[tuple[int, int]],
    endpoints_of: Callable[[int], Sequence[str]],
) -> Callable[[int], Awaitable[EngineGroup]]:
    """A function that starts engine number n, which connects to the endpoints of that number."""
    is_paced = settings.engine == "paced"
    kept = contextlib.ExitStack()

    async def start(number: int) -> EngineGroup:
        kept.close()
        address = settings.dist_init_addr
        if layers and not address:
            address = f"{HERE}:{kept.enter_context(kept_port(HERE))}"
        launches = launches_of(settings, launch, layers, number, address)
        return await EngineGroup.start(
            launches,
            endpoints_of(number),
            is_paced=is_paced,
            environment=environment_of(settings.device, os.environ),
        )

    return start


def environment_of(device: str, ours: Mapping[str, str]) -> dict[str, str]:
    """The environment of engine processes. On a CPU a step reads all weights, which lie in memory
    of the C library. Tunables that the caller has set stay as they are."""
    more = {} if is_device(device) else HUGE_PAGES
    return {**more, **cleaned(ours)}
