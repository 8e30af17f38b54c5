"""What fits: the slots and pages that given memory holds, and what a request needs of them.

The door admits by these counts, planner and simulator predict with them, the server and the plan of
a checkpoint explain with them. Index pages and host pages hold 64 tokens of all layers. Slots are
counted per layer group: memory for them is cut into chunks, each group gets chunks in proportion to
what a slot of it costs, and the group with the fewest slots is the one that limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.pool.ledger import Account
from ess.units import PAGE_ROWS, div_ceil, format_bytes

SLOTS: Final = "slots"
INDEX_PAGES: Final = "index pages"
HOST_PAGES: Final = "host pages"
SEQUENCES: Final = "sequences"

Needs = dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Slots of every layer group, and pages."""

    slots: int
    index_pages: int
    host_pages: int

    def request_max(self, needs: Needs) -> Needs:
        """By account: how many requests with these needs it holds."""
        held = {SLOTS: self.slots, INDEX_PAGES: self.index_pages, HOST_PAGES: self.host_pages}
        return {name: held[name] // needed for name, needed in needs.items()}

    def accounts(
        self,
        layout: ModelLayout,
        *,
        index_page_bytes: int | None = None,
        used: Mapping[str, Callable[[], int]] | None = None,
    ) -> list[Account]:
        """For a ledger. Nothing counts as drawn where `used` does not say; an index page costs the
        layout's bytes where no others are given."""
        units = {
            SLOTS: (self.slots, layout.slot_bytes),
            INDEX_PAGES: (self.index_pages, index_page_bytes or layout.index_page_bytes),
            HOST_PAGES: (self.host_pages, layout.host_page_bytes),
        }
        return [
            Account(
                name=name,
                times=f" x {layout.group_count} groups" if name == SLOTS else "",
                unit_bytes=unit_bytes,
                capacity=count,
                used=(used or {}).get(name, lambda: 0),
            )
            for name, (count, unit_bytes) in units.items()
        ]


def needs(length: int, *, slots: int, batch: int = 1) -> Needs:
    """What `batch` requests of this length reserve, with so many slots each."""
    pages = batch * page_count(length)
    return {SLOTS: batch * slots, INDEX_PAGES: pages, HOST_PAGES: pages}


def page_count(length: int) -> int:
    return div_ceil(length, PAGE_ROWS)


def request_bytes(layout: ModelLayout, needed: Needs) -> int:
    """On the device."""
    return needed[SLOTS] * layout.slot_bytes + needed[INDEX_PAGES] * layout.index_page_bytes


def capacity_of(
    layout: ModelLayout, *, slot_bytes: int, host_bytes: int, index_bytes: int
) -> Capacity:
    return Capacity(
        slots=_even_slots(layout, slot_bytes // layout.chunk_bytes),
        index_pages=index_bytes // layout.index_page_bytes,
        host_pages=host_bytes // layout.host_page_bytes,
    )


def whole_count(name: str, size: int, unit: int, *, count_min: int = 1) -> int:
    """How many units `size` bytes hold; the caller calls the size `name`."""
    count = size // unit
    if count < count_min:
        raise BadInput(
            f"{name} is {format_bytes(size)}, the least that works is "
            f"{format_bytes(count_min * unit)} ({count_min} x {format_bytes(unit)})"
        )
    return count


def even_chunks(layout: ModelLayout, chunk_count: int) -> list[int]:
    """Chunks of each group such that all groups have about the same number of slots.

    A group of m layers needs m times the bytes per slot, so it gets chunks in proportion to the
    chunks that one of its slots costs. Every group gets at least one.
    """
    weights = np.array([1 / blocks for blocks in _blocks_per_chunk(layout)])
    return share_out(weights, chunk_count)


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


def _even_slots(layout: ModelLayout, chunk_count: int) -> int:
    """Slots of the group that gets the fewest; none if some group would get no chunk."""
    if chunk_count < layout.group_count:
        return 0
    shares = zip(even_chunks(layout, chunk_count), _blocks_per_chunk(layout), strict=True)
    return min(chunks * blocks for chunks, blocks in shares) * PAGE_ROWS


def _blocks_per_chunk(layout: ModelLayout) -> list[int]:
    return [layout.group_layers_max // len(group) for group in layout.groups]
