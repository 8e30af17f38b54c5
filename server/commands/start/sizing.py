"""From settings and a checkpoint's config to the pools: sizes, capacities, what limits them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final

import msgspec

from ess.engine.graphs.buckets import rehearsed_length
from ess.errors import BadInput, EssError, Unavailable
from ess.free_resources import memory_free
from ess.kernels.served import LOGIT_BYTES, SELECT_BYTES
from ess.layout import ModelLayout
from ess.pool.capacity import (
    HOST_PAGES,
    INDEX_PAGES,
    SLOTS,
    WINDOW_SLOTS,
    capacity_of,
    needs,
)
from ess.server.commands.start.settings import FIELDS, Settings
from ess.units import PAGE_ROWS, align_up, div_ceil, exact_bytes, format_bytes, parse_size

AUTO: Final = "auto"
SIZES: Final = (
    *("host_bytes", "slot_bytes", "index_bytes", "device_bytes", "graph_bytes"),
    *("max_model_len", "body_bytes", "header_bytes", "unread_bytes", "keep_responses"),
)
HOST_SHARE: Final = 4  # of free memory, at most, unless host_bytes says how much
HOST_BYTES_MAX: Final = 4 << 30
LENGTHS: Final = (2048, 8192, 32768, 131072)
STATE_COPIES: Final = {"both": 2, "prefill": 3, "decode": 3}
"""Copies of the state beside the rows, by role: of running requests, of cached prompts, and of
handoffs."""


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests of a length fit, and what a further request would lack."""

    length: int
    count: int
    limiter: str


class Item(StrEnum):
    """What takes memory of a device, as it is printed."""

    WEIGHTS = "weights"
    SLOTS = "slots"
    INDEX_KEYS = "index keys"
    RESIDENCY = "residency"
    DECODING = "decoding"
    PROMPTS = "prompts"
    STATES = "states"
    GRAPHS = "graphs"


DECIDED_BY: Final[Mapping[Item, str]] = {
    Item.WEIGHTS: "form",
    Item.SLOTS: "slot_bytes",
    Item.INDEX_KEYS: "index_bytes",
    Item.RESIDENCY: "max_running",
    Item.DECODING: "max_running",
    Item.PROMPTS: "chunk_tokens",
    Item.STATES: "chunk_tokens",
    Item.GRAPHS: "graphs",
}
"""The setting that decides how much."""


class Line(msgspec.Struct, frozen=True):
    item: Item = msgspec.field(name="name")
    bytes: int
    note: str


class DevicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is taken of a device, and of host memory with locked pages, against what there is.
    `room` is what ESS may take of the device, `free` what was unused when it was asked."""

    name: str
    lines: tuple[Line, ...]
    room: int
    free: int
    total: int
    locked: int
    host_free: int

    @property
    def taken(self) -> int:
        return sum(line.bytes for line in self.lines)

    def bytes_of(self, *items: Item) -> int:
        return sum(line.bytes for line in self.lines if line.item in items)


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`weight_bytes` are what engines on a CPU hold of weights, and those of the files where an
    engine is on a device; `state_bytes` are what requests keep beside their rows, as much again for
    shared beginnings of prompts, and again for what is handed over; `logit_bytes` are scores of the
    longest request's keys, in all threads. With a `device`, slots and index are there; with
    `stages` each of this machine has a device."""

    length_max: int
    host_bytes: int
    slot_bytes: int
    index_bytes: int
    weight_bytes: int
    token_capacity: int
    rooms: tuple[Room, ...]
    state_bytes: int = 0
    logit_bytes: int = 0
    device: DevicePlan | None = None
    stages: tuple[DevicePlan, ...] = ()

    @property
    def graph_bytes(self) -> int:
        return 0 if self.device is None else self.device.bytes_of(Item.GRAPHS)

    @property
    def step_bytes(self) -> int:
        """Of steps and prompts on a device, outside of graphs."""
        return 0 if self.device is None else self.device.bytes_of(Item.DECODING, Item.PROMPTS)

    @property
    def total_bytes(self) -> int:
        pools = self.host_bytes + self.slot_bytes + self.index_bytes
        return pools + self.state_bytes + self.logit_bytes + self.weight_bytes


def plan_memory(
    settings: Settings,
    layout: ModelLayout,
    *,
    positions_max: int,
    weight_bytes: int,
    free: int | None = None,
    state_copies: int | None = None,
) -> MemoryPlan:
    """Plans the pools. Unavailable if too little memory is free. `free` is this machine's free
    memory, read if not given, `state_copies` how many times requests' states are kept, by default
    as the role needs."""
    copies = STATE_COPIES[settings.role] if state_copies is None else state_copies
    free = memory_free() if free is None else free
    longest = asked_length(settings, positions_max)
    host_bytes = _host_bytes(settings, layout, longest, free)
    length_max, token_capacity = check_host(settings, layout, host_bytes, longest, free)
    slot_bytes = _slot_bytes(settings, layout, length_max, free)
    index_bytes = token_capacity // layout.page_tokens * layout.index_page_bytes
    if settings.index_bytes != AUTO:
        index_bytes = size_of(settings.index_bytes, of=free)
    plan = MemoryPlan(
        length_max=length_max,
        host_bytes=host_bytes,
        slot_bytes=slot_bytes,
        index_bytes=index_bytes,
        weight_bytes=weight_bytes,
        token_capacity=token_capacity,
        rooms=(),
        state_bytes=copies * settings.max_running * layout.request_state_bytes(length_max),
        logit_bytes=_logit_bytes(settings, layout, length_max),
    )
    _check_fit(plan, settings, free)
    return with_rooms(plan, settings, layout)


def now_or_never(now: Callable[[], MemoryPlan], alone: Callable[[], MemoryPlan]) -> MemoryPlan:
    """The plan for the memory that is free `now`. Where that is refused, and so is the plan for all
    of the machine's memory (`alone`), the settings are at fault: the refusal is a BadInput."""
    try:
        return now()
    except Unavailable as error:
        try:
            alone()
        except EssError:
            sentence = f"{error}; it would not fit either if nothing else ran here"
            raise BadInput(sentence) from None
        raise


def asked_length(settings: Settings, positions_max: int) -> int:
    """Tokens of the longest request, as far as settings and the model decide."""
    if settings.max_model_len == AUTO:
        return positions_max
    length_max = size_of(settings.max_model_len, of=positions_max)
    if not 2 <= length_max <= positions_max:
        raise BadInput(
            f"max_model_len is {length_max:,}, must be 2 to {positions_max:,} for this model"
        )
    rehearsed = rehearsed_length(settings.graphs, verified_max=settings.mtp)
    if settings.device != "cpu" and length_max < rehearsed:
        raise BadInput(
            f"max_model_len is {length_max:,}, but graphs are captured with requests of"
            f" {rehearsed} tokens, with mtp {settings.mtp}: give {rehearsed} or more, or graphs 0"
        )
    return length_max


def check_host(
    settings: Settings, layout: ModelLayout, host_bytes: int, longest: int, free: int
) -> tuple[int, int]:
    """The longest request that the host's rows allow, and how many tokens they hold."""
    _check_size("host_bytes", host_bytes, free)
    token_capacity = host_bytes // layout.host_page_bytes * layout.page_tokens
    if token_capacity < 2:
        raise BadInput(
            f"host_bytes is {format_bytes(host_bytes)}, less than one page of"
            f" {format_bytes(layout.host_page_bytes)}"
        )
    is_auto = settings.max_model_len == AUTO
    return min(longest, token_capacity) if is_auto else longest, token_capacity


def with_rooms(plan: MemoryPlan, settings: Settings, layout: ModelLayout) -> MemoryPlan:
    """Adds the rooms; refuses a plan without room for a request of its promised length."""
    longest = plan.length_max
    lengths = sorted({*(length for length in LENGTHS if length < longest), longest})
    rooms = tuple(_room(plan, settings, layout, length) for length in lengths)
    plan = msgspec.structs.replace(plan, rooms=rooms)
    _check_rooms(plan, layout)
    return plan


def _check_size(name: str, size: int, free: int) -> None:
    if size > free:
        raise Unavailable(
            f"{name} is {format_bytes(size)}, but {format_bytes(free)} are free on this machine"
        )


def _check_fit(plan: MemoryPlan, settings: Settings, free: int) -> None:
    """Refuses a plan that the machine cannot hold, before anything is allocated. Unavailable: the
    same settings may fit when other processes have ended (`now_or_never`)."""
    for name in ("slot_bytes", "index_bytes"):
        if getattr(settings, name) != AUTO:
            _check_size(name, getattr(plan, name), free)
    if plan.total_bytes <= free:
        return
    parts = {
        "weights": plan.weight_bytes,
        **{name: getattr(plan, name) for name in ("host_bytes", "slot_bytes", "index_bytes")},
        **({"state_bytes": plan.state_bytes} if plan.state_bytes else {}),
        **({"logit_bytes": plan.logit_bytes} if plan.logit_bytes else {}),
    }
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    raise Unavailable(
        f"the plan needs {format_bytes(plan.total_bytes)} ({listed}), but {format_bytes(free)} are"
        f" free on this machine; lower {_to_lower(parts, settings)}"
    )


def _to_lower(parts: Mapping[str, int], settings: Settings) -> str:
    """The setting that decides the largest part."""
    largest = max(parts, key=lambda name: parts[name])
    if largest == "weights":
        return "nothing: this model is too large for it"
    if largest == "logit_bytes":
        return f"threads, now {settings.threads:,}, or max_model_len: {largest} follows them"
    if getattr(settings, largest, AUTO) != AUTO:
        return f"{largest}, now {getattr(settings, largest)}"
    return f"max_running, now {settings.max_running:,}, or max_model_len: {largest} follows them"


def _check_rooms(plan: MemoryPlan, layout: ModelLayout) -> None:
    """Refuses a server that has no room for a single request of the length that it promises."""
    [last] = plan.rooms[-1:]
    if last.count:
        return
    pages, slot_bytes = layout.pages_of(last.length), _bytes_for(layout, last.length)
    least = {
        "host_bytes": pages * layout.host_page_bytes,
        "index_bytes": pages * layout.index_page_bytes,
        "slot_bytes": slot_bytes,
    }[last.limiter]
    raise BadInput(
        f"{last.limiter} is {exact_bytes(getattr(plan, last.limiter))}: not one request of"
        f" {last.length:,} tokens fits; give {exact_bytes(least)}, or lower max_model_len"
    )


def _host_bytes(settings: Settings, layout: ModelLayout, length_max: int, free: int) -> int:
    if settings.host_bytes != AUTO:
        return size_of(settings.host_bytes, of=free)
    enough = settings.max_running * layout.pages_of(length_max) * layout.host_page_bytes
    return min(enough, free // HOST_SHARE, HOST_BYTES_MAX)


def _slot_bytes(settings: Settings, layout: ModelLayout, length_max: int, free: int) -> int:
    if settings.slot_bytes != AUTO:
        return size_of(settings.slot_bytes, of=free)
    return promised_slots(settings, layout, length_max)


def _logit_bytes(settings: Settings, layout: ModelLayout, length_max: int) -> int:
    if not layout.key_groups:
        return 0
    kept = max(1, settings.threads) * SELECT_BYTES
    if settings.evict == "score":  # the logits of a whole step are kept apart until ranks follow
        kept += settings.max_running * settings.mtp * LOGIT_BYTES
    return settings.world_size * kept * align_up(length_max, PAGE_ROWS)


def promised_slots(settings: Settings, layout: ModelLayout, length_max: int) -> int:
    """Bytes of the slots that every running request is promised, and a quarter more."""
    return _bytes_for(layout, length_max, times=settings.max_running * 5, share=4)


def _bytes_for(layout: ModelLayout, length: int, *, times: int = 1, share: int = 1) -> int:
    """Bytes of slots in all groups for `times` / `share` requests of this length, with one page
    more in each, and of the gaps between slabs."""
    each, size = layout.slots_of(length, layout.slot_floor), 0
    for group in range(layout.group_count):
        floor = min(each, layout.window_floor) if layout.window_of(group) else each
        pages = div_ceil(times * floor, share * PAGE_ROWS) + 1
        size += pages * layout.size_chunk_bytes(layout.group_row(group).row_bytes)
    between = (len(layout.row_sizes) - 1) * layout.chunk_bytes
    return div_ceil(size + between, layout.chunk_bytes) * layout.chunk_bytes


def _room(plan: MemoryPlan, settings: Settings, layout: ModelLayout, length: int) -> Room:
    capacity = capacity_of(
        layout,
        slot_bytes=plan.slot_bytes,
        host_bytes=plan.host_bytes,
        index_bytes=plan.index_bytes,
        slots_each=layout.slots_of(plan.length_max, layout.slot_floor),
    )
    slots, floor = layout.slots_of(length, layout.slot_floor), layout.window_floor
    needed = needs(length, slots=slots, window_floor=floor, page_tokens=layout.page_tokens)
    most = capacity.request_max(needed)
    counts = {
        "max_running": settings.max_running,
        "host_bytes": most[HOST_PAGES],
        "index_bytes": most[INDEX_PAGES],
        "slot_bytes": min(most[SLOTS], most.get(WINDOW_SLOTS, most[SLOTS])),
    }
    limiter = min(counts, key=lambda name: counts[name])
    return Room(length=length, count=counts[limiter], limiter=limiter)


def check_sizes(settings: Settings) -> None:
    """Refuses a setting that is no size, also where only the engine's process would read it. Too
    little for what comes in or waits would refuse every request, or end every stream."""
    parse_size(settings.prefix_cache_disk, "prefix_cache_disk")
    for name in SIZES:
        text = getattr(settings, name)
        try:
            size = size_of(text, of=1 << 40) if text != FIELDS[name].default else None
        except BadInput as error:
            raise BadInput(f"{name}: {error}") from None
        least = FIELDS[name].least
        if size is not None and least and size < parse_size(least):
            raise BadInput(f"{name} is {text}; must be at least {least}")


def size_of(text: str, *, of: int) -> int:
    """A size, or a share of `of`: 25%, or 0.25 as vLLM and SGLang write it.

    >>> size_of("25%", of=4096), size_of("0.25", of=4096)
    (1024, 1024)
    """
    if text.startswith(("0.", ".")) and text.lstrip("0").lstrip(".").isdigit():
        return int(of * float(text))
    if text.endswith("%"):
        try:
            share = float(text[:-1])
        except ValueError:
            raise BadInput(f"{text!r} is not a share; write 25%") from None
        if not 0 < share <= 100:
            raise BadInput(f"{text!r} is not a share of 0% to 100%")
        return int(of * share / 100)
    return parse_size(text)
