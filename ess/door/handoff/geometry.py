"""Where the units of a handoff lie in registered memory. A unit is a page of a layer, or a part of
what the request keeps beside its rows, its state.

    ROWS      rows of the host pool, [layer][page]; MTP layers are the last ones
    KEYS      its index keys, [key layer][page]
    SLOTS     a slot for each handoff: its windows, and its state behind the most room that its
              windows may need
    PACKED    windows and parts of states that are to leave

The numbers of the regions are the same on both sides, the places in them are each side's own: they
depend on its pages and on how many its pool has.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ess.layout import ModelLayout
from ess.pool.keys import KeyPages
from ess.transfer.arrivals import Share
from ess.transfer.messages import Piece, PieceKind, Reserved
from ess.transfer.runs import Region, Runs, page_runs
from ess.transfer.transports.shared import shared_region
from ess.transfer.windows import window_bytes_max
from ess.units import PAGE_ROWS, align_up, div_ceil

ROWS: Final = 1
KEYS: Final = 2
SLOTS: Final = 3
PACKED: Final = 4

SLOT_ALIGN: Final = 4096
STATE_UNIT_BYTES: Final = 64 << 10


class Ground(Protocol):
    """Rows [layer][host row] and index keys [key layer][page]: a latent pool, or what a pool is a
    part of."""

    @property
    def layout(self) -> ModelLayout: ...

    @property
    def row_memory(self) -> NDArray[np.uint8]: ...

    @property
    def keys(self) -> KeyPages: ...

    @property
    def fd(self) -> int | None: ...


def pool_regions(ground: Ground) -> list[Region]:
    """The regions of the host pool: its rows and its keys, flat."""
    rows, keys = ground.row_memory, ground.keys.pages.reshape(-1)
    regions = [Region(ROWS, rows, ground.fd), Region(KEYS, keys, ground.fd, begin=rows.size)]
    return [region for region in regions if region.memory.size]


def fresh_region(number: int, size: int, ground: Ground) -> Region:
    """More registered memory of its kind: of a memory file or of this process alone."""
    if ground.fd is None:
        return Region(number, np.zeros(size, np.uint8))
    return shared_region(number, size)


def slot_bytes(layout: ModelLayout, length: int) -> int:
    """Room for the windows of any prompt of at most this length, from as many workers as there are
    layer groups, and for its state, to the next page of memory."""
    heads = (layout.group_count - 1) * window_bytes_max(0, 0)
    windows = window_bytes(layout, layout.group_count, length)
    return align_up(heads + windows + layout.request_state_bytes(length), SLOT_ALIGN)


def window_bytes(layout: ModelLayout, group_count: int, length: int) -> int:
    """The most bytes that the windows of a prompt of `length` tokens take; windows select rows."""
    return window_bytes_max(group_count, layout.rows_of(length), layout.top_k)


def state_span(layout: ModelLayout, length: int, units: range) -> slice:
    """The bytes of these units in the state of a prompt of `length` tokens; its last unit may be
    shorter."""
    end = min(units.stop * STATE_UNIT_BYTES, layout.request_state_bytes(length))
    return slice(units.start * STATE_UNIT_BYTES, end)


def state_units(layout: ModelLayout, length: int) -> int:
    return div_ceil(layout.request_state_bytes(length), STATE_UNIT_BYTES)


def slot_runs(
    layout: ModelLayout, kind: PieceKind, units: range, size: int, room: Reserved
) -> Runs:
    """Windows of `size` bytes, or units of a state, in the receiver's slot."""
    begin = room.window_at
    if kind is PieceKind.STATE:
        begin += window_bytes(layout, layout.group_count, room.token_count)
        begin += state_span(layout, room.token_count, units).start
    return np.array([[SLOTS, begin, size]], np.int64)


def row_pages(layout: ModelLayout, length: int) -> int:
    """How many pages hold the rows of a prompt of `length` tokens."""
    return div_ceil(layout.rows_of(length), PAGE_ROWS)


def unit_bytes(layout: ModelLayout, kind: PieceKind) -> int:
    """The bytes of the largest unit."""
    if kind is PieceKind.ROWS:
        return layout.page_bytes
    assert kind is PieceKind.INDEX_KEYS, f"{kind.name} have no units of equal size"
    return layout.index.page_bytes if layout.index is not None else 0


def wire_layers(layout: ModelLayout, kind: PieceKind, layers: range) -> range:
    """Layers of a part of the model as all workers number them: those with keys have numbers of
    their own."""
    first = layout.first_layer if kind is PieceKind.ROWS else layout.first_key_layer
    return range(first + layers.start, first + layers.stop)


def part_layers(layout: ModelLayout, kind: PieceKind, wired: range) -> range:
    """The reverse of `wire_layers`, without layers before the part. `Units.again` finds none behind
    it."""
    first = layout.first_layer if kind is PieceKind.ROWS else layout.first_key_layer
    return range(max(wired.start - first, 0), max(wired.stop - first, 0))


def shares(
    layout: ModelLayout, layers: range, groups: range, *, first_page: int, token_count: int
) -> list[Share]:
    """All that a worker with these layers brings, of the positions behind the pages that are there
    already."""
    page_count = row_pages(layout, token_count) - first_page
    key_layers = layout.key_layers_of(groups)
    paged = [
        Share(
            kind=kind,
            layer_begin=of.start,
            layer_end=of.stop,
            page_begin=first_page,
            page_count=page_count,
            unit_bytes=unit_bytes(layout, kind),
            layer_bytes=_page_bytes(layout, of) if kind is PieceKind.ROWS else (),
        )
        for kind, of in ((PieceKind.ROWS, layers), (PieceKind.INDEX_KEYS, key_layers))
        if of
    ]
    size = window_bytes(layout, len(groups), token_count)
    windows = Share(
        kind=PieceKind.WINDOWS, layer_begin=0, layer_end=1, page_count=1, unit_bytes=size
    )
    return [*paged, windows, *_state_shares(layout, token_count)]


def _state_shares(layout: ModelLayout, token_count: int) -> list[Share]:
    count = state_units(layout, token_count)
    if not count:
        return []
    last = state_span(layout, token_count, range(count - 1, count))
    state = Share(
        kind=PieceKind.STATE,
        layer_begin=0,
        layer_end=1,
        page_count=count,
        unit_bytes=STATE_UNIT_BYTES,
        last_bytes=last.stop - last.start,
    )
    return [state]


def unit_runs(
    layout: ModelLayout,
    kind: PieceKind,
    layers: range,
    pages: NDArray[np.int64],
    pool_pages: int,
    *,
    is_whole: bool = False,
) -> Runs:
    """Where these pages lie in each of the layers, layer by layer, in a pool of `pool_pages` pages:
    the pool of a worker with these layers, or the pool of the whole model."""
    if kind is PieceKind.ROWS:
        return _row_runs(layout, layers, pages, pool_pages, is_whole=is_whole)
    first = layout.first_key_layer if is_whole else 0
    numbers = np.arange(first + layers.start, first + layers.stop, dtype=np.int64)
    places = (numbers[:, None] * pool_pages + pages).reshape(-1)
    return page_runs(KEYS, places, page_bytes=unit_bytes(layout, kind))


def _row_runs(
    layout: ModelLayout,
    layers: range,
    pages: NDArray[np.int64],
    pool_pages: int,
    *,
    is_whole: bool,
) -> Runs:
    """A layer begins behind as many pages of the layers before it as the pool has."""
    sizes = np.array(_page_bytes(layout, layers), np.int64)
    before = sum(_page_bytes(layout, range(layers.start)))
    before += PAGE_ROWS * layout.bytes_before if is_whole else 0
    begins = (before + np.cumsum(sizes) - sizes) * pool_pages
    runs = np.empty((len(layers), len(pages), 3), np.int64)
    runs[:, :, 0] = ROWS
    runs[:, :, 1] = begins[:, None] + sizes[:, None] * pages
    runs[:, :, 2] = sizes[:, None]
    return runs.reshape(-1, 3)


def _page_bytes(layout: ModelLayout, layers: range) -> tuple[int, ...]:
    return tuple(PAGE_ROWS * size for size in layout.layer_bytes(layers))


def piece_runs(layout: ModelLayout, piece: Piece, room: Reserved) -> Runs:
    """Where a piece lies in the room that was reserved for it."""
    if not piece.kind.is_of_layers:
        units = range(piece.page_begin, piece.page_end)
        return slot_runs(layout, piece.kind, units, piece.byte_count, room)
    begin, end = piece.page_begin - room.first_page, piece.page_end - room.first_page
    assert 0 <= begin < end <= len(room.pages), f"{piece} is outside of {len(room.pages)} pages"
    layers = range(piece.layer_begin, piece.layer_end)
    pages = np.array(room.pages[begin:end], np.int64)
    return unit_runs(layout, piece.kind, layers, pages, room.pool_pages)
