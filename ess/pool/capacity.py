"""How many slots and pages given memory holds, and how many of them a request needs.

Groups whose layers attend to a window need slots for it, however long a request is: they have an
account of their own.

The door admits by these counts, planner and simulator predict with them, the server and the plan of
a checkpoint explain with them. Index pages and host pages hold 64 tokens of all layers. Slots are
counted per layer group: memory for them is cut into chunks, each group gets chunks in proportion to
what a slot of it costs, and the group with the fewest slots limits the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.pool.ledger import Account
from ess.pool.slabs import Slab, blocks_of, divided, least_bytes
from ess.units import PAGE_ROWS, div_ceil, format_bytes

SLOTS: Final = "slots"
WINDOW_SLOTS: Final = "window slots"
INDEX_PAGES: Final = "index pages"
HOST_PAGES: Final = "host pages"
SEQUENCES: Final = "sequences"

Needs = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Slots of every layer group, slots of groups with a window, and pages."""

    slots: int
    index_pages: int
    host_pages: int
    window_slots: int = 0

    def request_max(self, needs: Needs) -> Needs:
        """How many requests with these needs each account holds."""
        held = {
            SLOTS: self.slots,
            WINDOW_SLOTS: self.window_slots,
            INDEX_PAGES: self.index_pages,
            HOST_PAGES: self.host_pages,
        }
        return {name: held[name] // needed for name, needed in needs.items()}

    def accounts(
        self,
        layout: ModelLayout,
        *,
        index_page_bytes: int | None = None,
        used: Mapping[str, Callable[[], int]] | None = None,
    ) -> list[Account]:
        """Accounts for a ledger. An account that `used` does not name counts nothing as drawn; an
        index page costs the layout's bytes unless `index_page_bytes` says otherwise."""
        window_count = sum(window > 0 for window in layout.windows)
        groups = {SLOTS: layout.group_count - window_count, WINDOW_SLOTS: window_count}
        units = {
            SLOTS: (self.slots, layout.slot_bytes),
            WINDOW_SLOTS: (self.window_slots, layout.window_slot_bytes),
            INDEX_PAGES: (self.index_pages, index_page_bytes or layout.index_page_bytes),
            HOST_PAGES: (self.host_pages, layout.host_page_bytes),
        }
        return [
            Account(
                name=name,
                times=f" x {groups[name]} groups" if name in groups else "",
                unit_bytes=unit_bytes,
                capacity=count,
                used=(used or {}).get(name, lambda: 0),
            )
            for name, (count, unit_bytes) in units.items()
            if groups.get(name, 1)
        ]


def needs(
    length: int,
    *,
    slots: int,
    window_floor: int = 0,
    batch: int = 1,
    page_tokens: int = PAGE_ROWS,
) -> Needs:
    """What `batch` requests of this length reserve: `slots` each, and in groups with a window no
    more than the layout's `window_floor`."""
    pages = batch * div_ceil(length, page_tokens)
    windows = {WINDOW_SLOTS: batch * min(slots, window_floor)} if window_floor else {}
    return {SLOTS: batch * slots, **windows, INDEX_PAGES: pages, HOST_PAGES: pages}


def page_count(length: int) -> int:
    return div_ceil(length, PAGE_ROWS)


def request_bytes(layout: ModelLayout, needed: Needs) -> int:
    """Device bytes of these needs."""
    windows = needed.get(WINDOW_SLOTS, 0) * layout.window_slot_bytes
    pages = needed[INDEX_PAGES] * layout.index_page_bytes
    return needed[SLOTS] * layout.slot_bytes + windows + pages


def capacity_of(
    layout: ModelLayout,
    *,
    slot_bytes: int,
    host_bytes: int,
    index_bytes: int,
    slots_each: int | None = None,
) -> Capacity:
    """`slots_each` is what a request reserves of a group, by default the layout's floor."""
    memory = slot_bytes // layout.chunk_bytes * layout.chunk_bytes
    slots = {
        group: count * len(blocks_of(0, slab.chunk_rows, len(layout.groups[group]))) * PAGE_ROWS
        for slab in even_slabs(layout, memory, slots_each)
        for group, count in zip(slab.groups, slab.counts, strict=True)
    }
    return Capacity(
        **slots_min(layout, lambda group: slots.get(group, 0)),
        index_pages=index_bytes // layout.index_page_bytes,
        host_pages=host_bytes // layout.host_page_bytes,
    )


def whole_count(name: str, size: int, unit: int, *, count_min: int = 1) -> int:
    """How many units `size` bytes hold; errors call the size `name`."""
    count = size // unit
    if count < count_min:
        raise BadInput(
            f"{name} is {format_bytes(size)}, the least that works is "
            f"{format_bytes(count_min * unit)} ({count_min} x {format_bytes(unit)})"
        )
    return count


def slots_min(layout: ModelLayout, slots_of: Callable[[int], int]) -> dict[str, int]:
    """The fewest slots of a group, among groups without and with a window, by Capacity's names."""
    kinds: dict[str, list[int]] = {"slots": [], "window_slots": []}
    for group in range(layout.group_count):
        kinds["window_slots" if layout.window_of(group) else "slots"].append(slots_of(group))
    return {name: min(counts, default=0) for name, counts in kinds.items()}


def even_chunks(layout: ModelLayout, chunk_count: int) -> list[int]:
    """Chunks of each group such that all groups hold slots for equally many requests. All rows must
    have one size.
    """
    return _even_counts(layout, range(layout.group_count), chunk_count, None)


def even_slabs(layout: ModelLayout, byte_count: int, slots_each: int | None = None) -> list[Slab]:
    """`even_chunks` for rows of several sizes, as slabs; none if a group would get no chunk."""
    return divided(
        layout,
        byte_count,
        lambda groups, count: _even_counts(layout, groups, count, slots_each),
        lambda group: _share(layout, group, slots_each),
    )


def least_chunks(layout: ModelLayout) -> int:
    """The fewest chunks, of `chunk_bytes` each, with which every group has at least one."""
    return div_ceil(least_bytes(layout), layout.chunk_bytes)


def _even_counts(
    layout: ModelLayout, groups: Sequence[int], chunk_count: int, slots_each: int | None
) -> list[int]:
    """A group of m layers needs m times the bytes per slot, so it gets chunks in proportion to the
    chunks that one of its slots costs. A group with a window gets them in proportion to what a
    request reserves there, if it reserves `slots_each` elsewhere. Every group gets at least one.
    """
    most = max(len(layout.groups[group]) for group in groups)
    weights = [
        _share(layout, group, slots_each) / (most // len(layout.groups[group])) for group in groups
    ]
    return share_out(np.array(weights), chunk_count)


def _share(layout: ModelLayout, group: int, slots_each: int | None) -> float:
    """What a request reserves of this group, as a share of what it reserves without a window."""
    each = layout.slot_floor if slots_each is None else slots_each
    assert each > 0, f"{each} slots for a request"
    return min(1.0, layout.window_floor / each) if layout.window_of(group) else 1.0


def share_out(weights: npt.NDArray[np.float64], chunk_count: int) -> list[int]:
    """Whole chunks in proportion to `weights`, at least one each, largest remainder first."""
    spare = chunk_count - len(weights)
    assert spare >= 0, f"{chunk_count} chunks for {len(weights)} groups"
    assert weights.any(), "no group has a weight"
    exact = weights / weights.sum() * spare
    counts = 1 + np.floor(exact).astype(int)
    order = np.argsort(np.floor(exact) - exact, kind="stable")
    counts[order[: chunk_count - int(counts.sum())]] += 1
    assert counts.sum() == chunk_count, f"{counts.sum()} chunks given of {chunk_count}"
    return [int(count) for count in counts]
