"""How memory for slots is divided: a slab for each size of rows, in chunks that groups own.

The slabs lie behind one another in one memory, widest rows first. Slot s of a slab with rows of b
bytes lies at byte s * b of that memory, so each slab is a matrix that begins where the memory does.
No two slabs share a slot number: a slab that begins at byte x has slots from x / b on; the slab
before it ends at or before x and has wider rows, so its numbers are lower. Numbers in between
belong to no slab. Chunks of a slab change between its own groups; no chunk leaves its slab.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ess.array_types import Ints, SlotIds
from ess.layout import ModelLayout
from ess.units import PAGE_ROWS, align_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """From slot `first` on, chunks of `chunk_rows` rows: `counts` of them for each of `groups`."""

    row_bytes: int
    groups: tuple[int, ...]
    chunk_rows: int
    first: int
    counts: tuple[int, ...]

    @property
    def chunk_count(self) -> int:
        return sum(self.counts)

    @property
    def stop(self) -> int:
        return self.first + self.chunk_count * self.chunk_rows

    @property
    def byte_end(self) -> int:
        return self.stop * self.row_bytes

    def chunks(self) -> tuple[Ints, SlotIds]:
        """The owner and the first slot of each chunk."""
        assert self.stop <= 1 << 31, f"slot {self.stop - 1} has no number of 31 bits"
        owners = np.repeat(np.array(self.groups, np.int32), self.counts)
        firsts = self.first + np.arange(self.chunk_count) * self.chunk_rows
        return owners, firsts.astype(np.int32)


def blocks_of(first: int, chunk_rows: int, layer_count: int) -> SlotIds:
    """First slots of the blocks that a chunk gives to a group of `layer_count` layers."""
    stride = layer_count * PAGE_ROWS
    starts = np.arange(0, chunk_rows - stride + 1, stride, dtype=np.int32)
    blocks: SlotIds = starts + np.int32(first)
    assert blocks[-1] + stride <= first + chunk_rows, f"past the end of the chunk at {first}"
    return blocks


def divided(
    layout: ModelLayout,
    byte_count: int,
    share: Callable[[Sequence[int], int], list[int]],
    weigh: Callable[[int], float],
) -> list[Slab]:
    """Divides the memory; no slabs if a group would get no chunk. `share` gives these groups their
    chunks of a slab, `weigh` says how many slots a group should have relative to others. The last
    slab also gets the memory that is left."""
    fits, fails = -1, byte_count // (PAGE_ROWS * layout.row_sizes[-1]) + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        ends = _ends(layout, _counts(layout, middle, weigh))
        fits, fails = (middle, fails) if ends[-1] <= byte_count else (fits, middle)
    if fits < 0:
        return []
    counts, last = _counts(layout, fits, weigh), layout.row_sizes[-1]
    counts[-1] += (byte_count - _ends(layout, counts)[-1]) // layout.size_chunk_bytes(last)
    return _slabs(layout, counts, share)


def _slabs(
    layout: ModelLayout, counts: Sequence[int], share: Callable[[Sequence[int], int], list[int]]
) -> list[Slab]:
    slabs, ends = list[Slab](), _ends(layout, counts)
    for size, count, end in zip(layout.row_sizes, counts, ends, strict=True):
        chunk, groups = layout.size_chunk_bytes(size), layout.size_groups(size)
        assert not (end - count * chunk) % (PAGE_ROWS * size), f"a slab ends at {end}"
        slabs.append(
            Slab(
                row_bytes=size,
                groups=groups,
                chunk_rows=chunk // size,
                first=(end - count * chunk) // size,
                counts=tuple(share(groups, count)),
            )
        )
    return slabs


def _counts(layout: ModelLayout, blocks: int, weigh: Callable[[int], float]) -> list[int]:
    """Chunks of each slab such that a group that weighs 1 gets `blocks` blocks of 64 slots. One
    more for each group covers what rounding loses when chunks are shared out."""
    counts = []
    for size in layout.row_sizes:
        most, groups = layout.size_layers_max(size), layout.size_groups(size)
        costs = (weigh(g) / (most // len(layout.groups[g])) for g in groups)
        counts.append(len(groups) + sum(math.ceil(blocks * cost) for cost in costs))
    return counts


def _ends(layout: ModelLayout, counts: Sequence[int]) -> list[int]:
    """The byte at which each slab ends, given its chunks."""
    ends, end = list[int](), 0
    for size, count in zip(layout.row_sizes, counts, strict=True):
        end = align_up(end, PAGE_ROWS * size) + count * layout.size_chunk_bytes(size)
        ends.append(end)
    return ends


def least_bytes(layout: ModelLayout) -> int:
    """The least memory that holds a chunk for each group."""
    return _ends(layout, [len(layout.size_groups(size)) for size in layout.row_sizes])[-1]
