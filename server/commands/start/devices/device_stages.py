"""The memory plan of a pipeline's stages, each on a device, before any of them takes anything.

Sizes of pools are those of all stages together: each has its layers' part of them. Stages keep no
working set and run no steps that decode, so their devices have weights, index keys, and what a
chunk takes; states of chunks come from the stage before and leave for the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from ess.comm.link import AHEAD_MAX, HELD_MAX
from ess.engine.chunking.sizer import PROFILE_MARGIN
from ess.engine.devices import DeviceReport, devices_here
from ess.engine.layer_bytes import F32
from ess.engine.step_bytes import prompt_bytes, staged_bytes
from ess.layout import ModelLayout
from ess.models.config import ModelConfig
from ess.models.weights.expected.kept_bytes import kept_bytes
from ess.models.weights.files.header import Entry
from ess.pool.device_bytes import locked_bytes, stage_shape
from ess.server.commands.start.devices.device_sizing import (
    check_fit,
    has_rooms_of,
    host_bytes_of,
    index_pages_of,
    pool_lines,
    room_of,
    value_bytes_of,
    weight_line,
)
from ess.server.commands.start.files.checkpoint import Checkpoint
from ess.server.commands.start.settings import Settings
from ess.server.commands.start.sizing import (
    DevicePlan,
    Item,
    Line,
    MemoryPlan,
    asked_length,
    check_host,
    promised_slots,
    with_rooms,
)
from ess.server.commands.start.topology import first_here, layers_of
from ess.server.process.engines.stages import stage_name
from ess.units import PAGE_ROWS

PACKS: Final = 2
"""Chunks whose rows are on a device: one has not landed when the next one is queued."""
COMING: Final = HELD_MAX + PACKS
"""States that a stage may hold of the one before, and those that are being read."""
LEAVING: Final = AHEAD_MAX + 1 + PACKS
"""States that the next stage has not taken, one that waits for them, and those that are made."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """The values that all stages share."""

    settings: Settings
    config: ModelConfig
    entries: Mapping[str, Entry]
    index_pages: int
    host_pages: int
    length_max: int

    @property
    def chunk_tokens(self) -> int:
        """The tokens of the largest chunk; the profile of dynamic chunks runs slightly larger
        ones."""
        more, of = PROFILE_MARGIN if self.settings.dynamic_chunking else (1, 1)
        return min(self.settings.chunk_tokens * more // of, self.length_max)


def plan_stages(
    settings: Settings,
    checkpoint: Checkpoint,
    entries: Mapping[str, Entry],
    layout: ModelLayout,
    reports: Mapping[str, DeviceReport],
    *,
    free: int,
) -> MemoryPlan:
    """`reports` are by the name of each device that stages have here, `free` is this machine's
    memory. BadInput with advice if a stage does not fit."""
    longest, all_free = asked_length(settings, checkpoint.config.positions_max), free
    if settings.nnodes > 1:
        all_free *= settings.nnodes
    host_bytes = host_bytes_of(settings, layout, longest, all_free)
    length_max, token_capacity = check_host(settings, layout, host_bytes, longest, all_free)
    host_pages = token_capacity // PAGE_ROWS
    share = Share(
        settings=settings,
        config=checkpoint.config,
        entries=entries,
        index_pages=index_pages_of(settings, layout, reports.values(), length_max, host_pages),
        host_pages=host_pages,
        length_max=length_max,
    )
    layers = layers_of(settings, layout, checkpoint.config)
    stages = _stages(share, layout, layers, reports, free)
    plan = MemoryPlan(
        length_max=length_max,
        host_bytes=host_bytes,
        slot_bytes=promised_slots(settings, layout, length_max),
        index_bytes=share.index_pages * layout.index_page_bytes,
        weight_bytes=checkpoint.weight_bytes,
        token_capacity=token_capacity,
        rooms=(),
        stages=stages,
    )
    held = sum(stage.bytes_of(Item.SLOTS) for stage in stages)
    return msgspec.structs.replace(with_rooms(plan, settings, layout), slot_bytes=held)


def _stages(
    share: Share,
    layout: ModelLayout,
    layers: Sequence[tuple[int, int]],
    reports: Mapping[str, DeviceReport],
    free: int,
) -> tuple[DevicePlan, ...]:
    """Those of this machine. Stages that share a device have equal parts of what may be taken."""
    devices, first = devices_here(share.settings), first_here(share.settings)
    sharing, plans = Counter(devices), list[DevicePlan]()
    for stage, device in enumerate(devices, first):
        report, count = reports[device], sharing[device]
        name = f"{stage_name(stage, layers[stage])} on {device}, {report.name}"
        part, has_rooms = layout.part(*layers[stage]), has_rooms_of(report, share.settings)
        lines, locked = _lines(share, part, range(*layers[stage]), has_rooms=has_rooms)
        plan = DevicePlan(
            name=name,
            lines=lines,
            room=room_of(report, share.settings, process_count=count) // count,
            free=report.free_bytes,
            total=report.total_bytes,
            locked=locked,
            host_free=free - sum(each.locked for each in plans),
        )
        check_fit(plan, share.settings)
        plans.append(plan)
    return tuple(plans)


def _lines(
    share: Share, part: ModelLayout, layers: range, *, has_rooms: bool
) -> tuple[tuple[Line, ...], int]:
    """What a stage takes of its device, and of the host with locked pages."""
    settings, config, length_max = share.settings, share.config, share.length_max
    shape = stage_shape(
        part,
        index_pages=share.index_pages,
        sequence_max=settings.max_running,
        length_max=length_max,
    )
    tokens = share.chunk_tokens
    sizes = {"chunk_tokens": tokens, "length_max": length_max}
    weights = kept_bytes(config, share.entries, settings.form, layers=layers)
    leaving = LEAVING if layers.stop < config.layer_count else 1
    states = ((layers.start > 0) * COMING + leaving) * tokens * config.residual_dim * F32
    prompts = prompt_bytes(
        config,
        part,
        **sizes,
        prompt_max=settings.max_running,
        value_bytes=value_bytes_of(settings),
        pack_count=PACKS,
        has_rooms=has_rooms,
    )
    lines = (
        weight_line(weights, settings),
        *pool_lines(shape),
        Line(Item.PROMPTS, prompts, f"estimated, {tokens:,} tokens a chunk"),
        Line(Item.STATES, states, "of chunks, from the stage before and for the next one"),
    )
    locked = locked_bytes(shape, host_pages=share.host_pages) + staged_bytes(
        part, **sizes, pack_count=PACKS
    )
    return lines, locked + states
