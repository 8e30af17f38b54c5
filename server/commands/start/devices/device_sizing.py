"""The memory plan of a server on a device: all that it will take, before it takes any.

Weights come from the files' headers, pools from their sizes, a step's memory from the model's
dimensions. Sizes that are not set are worked out in this order: rows on the host for every request
that may run, at most half of what is free there; index keys for as many, unless too little would be
left for slots; and for slots the rest of the device, but for no more rows than the host has.

A long request takes more index keys than slots: of DeepSeek-V3.2 at 128K tokens four times as many
bytes as its floor of slots. Index keys for all requests at their longest may then take the whole
device, and the server would refuse to start or admit few requests of any length. So before index
keys come the floors of slots of all requests that may run, or half of the room if that is less.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

import msgspec

from ess.engine.devices import DeviceReport
from ess.engine.graphs.buckets import bucket_sizes, graph_count
from ess.engine.layer_bytes import BF16, F32
from ess.engine.step_bytes import (
    decode_bytes,
    graph_bytes,
    graph_bytes_more,
    prompt_bytes,
    staged_bytes,
)
from ess.errors import BadInput, Unavailable
from ess.layout import ModelLayout
from ess.models.config import ModelConfig
from ess.pool.capacity import page_count
from ess.pool.device_bytes import PoolShape, locked_bytes, pool_bytes
from ess.server.commands.start.settings import Settings
from ess.server.commands.start.sizing import (
    AUTO,
    DECIDED_BY,
    DevicePlan,
    Item,
    Line,
    MemoryPlan,
    asked_length,
    check_host,
    size_of,
    with_rooms,
)
from ess.units import PAGE_ROWS, counted, div_ceil, format_bytes

HOST_SHARE: Final = 2  # of free memory, at most, unless host_bytes says how much
RESERVED: Final = 1 << 30
"""Free memory that each process leaves alone: for programs as they are loaded, workspaces of
libraries, what the allocator rounds up, and what further processes take to open the same device.
Processes that meet leave as much again for buffers of NCCL. An estimate: the usual share of
`device_bytes` leaves more."""


class DeviceNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the device besides the pools; the size settings do not change them, except those of
    the steps."""

    config: ModelConfig
    layout: ModelLayout
    weight_bytes: int
    file_bytes: int


def plan_on_device(
    settings: Settings, needed: DeviceNeeds, report: DeviceReport, *, free: int
) -> MemoryPlan:
    """The plan; `free` is the host's free memory. BadInput or Unavailable, with advice, if it
    does not fit."""
    layout = needed.layout
    longest = asked_length(settings, needed.config.positions_max)
    host_bytes = host_bytes_of(settings, layout, longest, free)
    length_max, token_capacity = check_host(settings, layout, host_bytes, longest, free)
    host_pages = token_capacity // PAGE_ROWS
    shape = _shape(settings, layout, report, length_max, host_pages)
    rest = [
        weight_line(needed.weight_bytes, settings),
        *_steps(needed, settings, length_max, has_rooms=has_rooms_of(report, settings)),
        _graphs(needed, settings, length_max, report),
    ]
    room = room_of(report, settings)
    left = room - sum(line.bytes for line in rest) - _unplanned(settings, layout, report)
    shape = _fitted(shape, settings, left, token_capacity)
    lines = (*rest[:1], *pool_lines(shape), *rest[1:])
    device = DevicePlan(
        name=report.name,
        lines=lines,
        room=room,
        free=report.free_bytes,
        total=report.total_bytes,
        locked=locked_bytes(shape, host_pages=host_pages)
        + staged_bytes(layout, chunk_tokens=settings.chunk_tokens, length_max=length_max),
        host_free=free,
    )
    check_fit(device, settings)
    plan = MemoryPlan(
        length_max=length_max,
        host_bytes=host_bytes,
        slot_bytes=shape.chunks * layout.chunk_bytes,
        index_bytes=shape.index_pages * layout.index_page_bytes,
        weight_bytes=needed.file_bytes,
        token_capacity=token_capacity,
        rooms=(),
        device=device,
    )
    return with_rooms(plan, settings, layout)


def room_of(report: DeviceReport, settings: Settings, *, process_count: int = 1) -> int:
    """The bytes of a device that may be planned, for all its processes together."""
    most = size_of(settings.device_bytes, of=report.total_bytes)
    return max(0, min(_usable(report, settings, process_count), most))


def _usable(report: DeviceReport, settings: Settings, process_count: int) -> int:
    meets = settings.dp_size > 1 or settings.is_staged
    return report.free_bytes - process_count * RESERVED * (1 + meets)


def _unplanned(settings: Settings, layout: ModelLayout, report: DeviceReport) -> int:
    """What the driver may keep of graphs beyond their line, as far as `device_bytes` leaves less:
    pools whose sizes are not set do not take it."""
    beyond = _usable(report, settings, 1) - room_of(report, settings)
    return max(0, graph_bytes_more(layout, _graph_count(settings)) - beyond)


def has_rooms_of(report: DeviceReport, settings: Settings) -> bool:
    """Whether DeepGEMM multiplies the experts' lines: weights in fp8 alone."""
    return report.has_rooms and settings.form == "stored"


def value_bytes_of(settings: Settings) -> int:
    """Bytes of a number that is multiplied: codes of fp8 are made from numbers in bfloat16."""
    return F32 if settings.form == "f32" else BF16


def host_bytes_of(settings: Settings, layout: ModelLayout, longest: int, free: int) -> int:
    if settings.host_bytes != AUTO:
        return size_of(settings.host_bytes, of=free)
    enough = settings.max_running * page_count(longest) * layout.host_page_bytes
    return min(enough, free // HOST_SHARE)


def _shape(
    settings: Settings, layout: ModelLayout, report: DeviceReport, length_max: int, host_pages: int
) -> PoolShape:
    """The pools, with as many chunks as slot_bytes says, or with as few as possible."""
    index_pages = index_pages_of(settings, layout, [report], length_max, host_pages)
    chunks = layout.group_count
    if settings.slot_bytes != AUTO:
        chunks = size_of(settings.slot_bytes, of=report.total_bytes) // layout.chunk_bytes
    _check_least("slot_bytes", settings, chunks, layout.group_count, unit=layout.chunk_bytes)
    return PoolShape(
        layout=layout,
        chunks=chunks,
        index_pages=index_pages,
        sequence_max=settings.max_running,
        length_max=length_max,
        query_max=settings.max_running * settings.mtp,
        is_scored=settings.evict == "score",
    )


def index_pages_of(
    settings: Settings,
    layout: ModelLayout,
    reports: Iterable[DeviceReport],
    length_max: int,
    host_pages: int,
) -> int:
    """Pages of index keys on each of the devices."""
    pages = min(host_pages, settings.max_running * page_count(length_max))
    if settings.index_bytes != AUTO:
        size = size_of(settings.index_bytes, of=sum(report.total_bytes for report in reports))
        pages = size // layout.index_page_bytes
    _check_least("index_bytes", settings, pages, 1, unit=layout.index_page_bytes)
    return pages


def _check_least(name: str, settings: Settings, count: int, least: int, *, unit: int) -> None:
    if count < least:
        raise BadInput(
            f"{name} is {getattr(settings, name)}, the least that works is"
            f" {format_bytes(least * unit)}"
        )


def _fitted(shape: PoolShape, settings: Settings, room: int, token_capacity: int) -> PoolShape:
    """Index pages first, then slots, as far as their sizes are not set."""
    if settings.index_bytes == AUTO:
        shape = _beside_slots(shape, room, is_given=settings.slot_bytes != AUTO)
    return _filled(shape, room, token_capacity) if settings.slot_bytes == AUTO else shape


def _beside_slots(most: PoolShape, room: int, *, is_given: bool) -> PoolShape:
    """As many index pages as leave room for slots: those that are given, or the floors of all
    requests, which get half of the room at most. No fewer than the longest request takes."""
    layout, chunks = most.layout, most.chunks
    if not is_given:
        floor = min(layout.slot_floor, most.length_max)
        floors = most.sequence_max * floor * layout.slot_bytes
        chunks = max(chunks, min(floors, room // 2) // layout.chunk_bytes)
    least = min(page_count(most.length_max), most.index_pages)
    beside = replace(most, chunks=chunks)
    pages = _largest(least, most.index_pages, room, lambda n: replace(beside, index_pages=n))
    return replace(most, index_pages=pages)


def _filled(least: PoolShape, room: int, token_capacity: int) -> PoolShape:
    """The most chunks that fit, up to slots for all rows of the host; `least` if none do."""
    more = (div_ceil(token_capacity, PAGE_ROWS) + 1) * least.layout.group_count
    most = least.chunks + more
    chunks = _largest(least.chunks, most, room, lambda n: replace(least, chunks=n))
    return replace(least, chunks=chunks)


def _largest(least: int, most: int, room: int, shaped: Callable[[int], PoolShape]) -> int:
    """The largest number up to `most` for which the pools fit; `least` if none above it does."""
    numbers = range(least + 1, most + 1)
    return least + bisect_right(
        numbers, room, key=lambda number: sum(pool_bytes(shaped(number)).values())
    )


def weight_line(size: int, settings: Settings) -> Line:
    how = "as stored" if settings.form == "stored" else f"in {settings.form}"
    return Line(Item.WEIGHTS, size, how)


def pool_lines(shape: PoolShape) -> list[Line]:
    takes = dict(pool_bytes(shape))
    slots = takes.pop("slots")
    index = takes.pop("index keys") + takes.pop("row maps")
    rest = sum(takes.values())
    return [
        Line(Item.SLOTS, slots, "the working set of rows"),
        Line(Item.INDEX_KEYS, index, "of running requests, and the map from their rows to slots"),
        Line(Item.RESIDENCY, rest, "what is where, page tables, what steps resolve and store in"),
    ]


def _steps(
    needed: DeviceNeeds, settings: Settings, length_max: int, *, has_rooms: bool
) -> list[Line]:
    """They take turns, and a library's room is taken of the same memory: it is counted once."""
    config, layout = needed.config, needed.layout
    queries, tokens = settings.max_running * settings.mtp, settings.chunk_tokens
    rooms_of_prompts = has_rooms and tokens > queries
    rooms_of_steps = has_rooms and not rooms_of_prompts
    more = {
        "length_max": length_max,
        "rank_count": settings.dp_size,
        "value_bytes": value_bytes_of(settings),
    }
    decode = decode_bytes(config, query_max=queries, has_rooms=rooms_of_steps, **more)
    more |= {"chunk_tokens": tokens, "prompt_max": settings.max_running}
    prompt = prompt_bytes(config, layout, has_rooms=rooms_of_prompts, **more)
    return [
        Line(Item.DECODING, decode, f"estimated, {queries:,} tokens a step"),
        Line(Item.PROMPTS, prompt, f"estimated, {tokens:,} tokens a chunk"),
    ]


def _graphs(needed: DeviceNeeds, settings: Settings, length_max: int, report: DeviceReport) -> Line:
    """The memory of graphs: the engine captures none beyond this."""
    sizes, count = _graph_sizes(settings), _graph_count(settings)
    size = graph_bytes(
        needed.config,
        needed.layout,
        query_max=max(sizes, default=0) * settings.mtp,
        graph_count=count,
        length_max=length_max,
        value_bytes=value_bytes_of(settings),
        rank_count=settings.dp_size,
        has_rooms=has_rooms_of(report, settings),
    )
    is_given = settings.graph_bytes != AUTO
    if is_given and count:
        size = size_of(settings.graph_bytes, of=report.total_bytes)
    note = f"{'given' if is_given else 'estimated'}, {counted(count, 'graph')} at most"
    if count:
        more = graph_bytes_more(needed.layout, count)
        note += f"; the driver may keep {format_bytes(more)} more for them"
    return Line(Item.GRAPHS, size, note)


def _graph_sizes(settings: Settings) -> tuple[int, ...]:
    splits = settings.tbo != "off"
    return bucket_sizes(settings.graph_sizes, largest=settings.max_running, splits=splits)


def _graph_count(settings: Settings) -> int:
    return graph_count(settings.graphs, _graph_sizes(settings), verified_max=settings.mtp)


def check_fit(device: DevicePlan, settings: Settings) -> None:
    """Refuses a plan that does not fit, before anything is allocated. Unavailable: it may fit when
    other processes have ended (`now_or_never`)."""
    if device.locked > device.host_free:
        raise Unavailable(
            f"the plan locks {format_bytes(device.locked)} of the host's memory, of which"
            f" {format_bytes(device.host_free)} are free: lower host_bytes"
        )
    if device.taken <= device.room:
        return
    listed = ", ".join(f"{line.item} {format_bytes(line.bytes)}" for line in device.lines)
    largest = max(device.lines, key=lambda line: line.bytes).item
    decides = DECIDED_BY[largest]
    raise Unavailable(
        f"the plan takes {format_bytes(device.taken)} of {device.name} ({listed}), and may take"
        f" {format_bytes(device.room)}: device_bytes is {settings.device_bytes} of"
        f" {format_bytes(device.total)}, and {format_bytes(device.free)} are free, of which"
        f" {format_bytes(RESERVED)} or more stay so for libraries; the largest"
        f" part is {largest}, which {decides} decides, now {getattr(settings, decides)}"
    )
