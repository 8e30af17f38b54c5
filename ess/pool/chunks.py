"""Which layer group owns which chunk of the slabs, and with it which blocks of 64 slots.

A chunk holds as many blocks of its group as fit: a slot of a group of m layers is m rows of the
slab, 64 apart. A chunk changes its owner when all of its slots have been cleared; nothing is copied
and no address changes. No chunk leaves its slab, and no group gives its last chunk away.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ess.array_types import SlotIds
from ess.layout import ModelLayout
from ess.pool.capacity import even_chunks
from ess.pool.slabs import Slab, blocks_of
from ess.units import PAGE_ROWS


class Chunks:
    """`most` says how many chunks each group may own at the most; by default all but one of each
    other group."""

    def __init__(
        self, layout: ModelLayout, slabs: Sequence[Slab], most: Sequence[int] | None = None
    ) -> None:
        self.layout = layout
        self.slabs = tuple(slabs)
        self._slab_of = {group: at for at, slab in enumerate(slabs) for group in slab.groups}
        self._most = most
        owners, firsts = zip(*(slab.chunks() for slab in slabs), strict=True)
        self._owner_of, self._first_of = np.concatenate(owners), np.concatenate(firsts)
        self._counts = self._counted()

    @classmethod
    def of_one_size(cls, layout: ModelLayout, count: int, most: Sequence[int]) -> Chunks:
        """`count` chunks for rows of one size, shared out evenly."""
        slab = Slab(
            row_bytes=layout.row_bytes,
            groups=tuple(range(layout.group_count)),
            chunk_rows=layout.group_layers_max * PAGE_ROWS,
            first=0,
            counts=tuple(even_chunks(layout, count)),
        )
        return cls(layout, [slab], most)

    def slab_number(self, group: int) -> int:
        return self._slab_of[group]

    def blocks(self, group: int) -> SlotIds:
        """The first slots of all blocks of the group, ascending."""
        chunks = np.flatnonzero(self._owner_of == group)
        assert chunks.size, f"group {group} owns no chunk, so it has no slot"
        return self.blocks_in(chunks, group)

    def blocks_in(self, chunks: npt.NDArray[np.int64], group: int) -> SlotIds:
        """The blocks that these chunks give to the group, if the group owns them."""
        rows, layers = self.slab(group).chunk_rows, self.layout.groups[group]
        within = blocks_of(0, rows, len(layers))
        blocks: SlotIds = (self._first_of[chunks][:, None] + within).reshape(-1)
        return blocks

    def slots_each(self, group: int) -> int:
        """How many slots one chunk gives to the group."""
        rows, layers = self.slab(group).chunk_rows, self.layout.groups[group]
        return len(blocks_of(0, rows, len(layers))) * PAGE_ROWS

    def counts(self) -> list[int]:
        """The chunks of each group."""
        return list(self._counts)

    def _counted(self) -> list[int]:
        counts: list[int] = np.bincount(self._owner_of, minlength=self.layout.group_count).tolist()
        assert all(counts), f"a group owns no chunk: {counts}"
        return counts

    def most(self, group: int) -> int:
        """The most chunks that the group may own."""
        assert 0 <= group < self.layout.group_count, f"there is no group {group}"
        if self._most is not None:
            return self._most[group]
        slab = self.slab(group)
        return slab.chunk_count - len(slab.groups) + 1

    def movable(self, source: int, target: int, count: int) -> list[npt.NDArray[np.int64]]:
        """The chunks that `source` may give to `target`, `count` together, the last ones first."""
        assert source != target, f"group {source} cannot give itself a chunk"
        assert self.slab(source) is self.slab(target), f"rows of {source} and {target} differ"
        chunks = np.flatnonzero(self._owner_of == source)[:0:-1]
        return list(chunks[: len(chunks) // count * count].reshape(-1, count))

    def give(self, chunks: npt.NDArray[np.int64], source: int, target: int) -> None:
        """These chunks, whose slots are cleared, belong to `target` from now on."""
        assert (self._owner_of[chunks] == source).all(), f"{chunks} are not all of group {source}"
        self._owner_of[chunks] = target
        self._counts[source] -= len(chunks)
        self._counts[target] += len(chunks)
        assert self._counts[source] > 0, f"group {source} has given its last chunk"

    def check(self) -> None:
        counts = self._counted()
        assert counts == self._counts, f"{counts} chunks of the groups, and {self._counts} by count"

    def slab(self, group: int) -> Slab:
        """The slab of the group. Its `counts` are those of the start; its `chunk_count` stays."""
        return self.slabs[self._slab_of[group]]
