"""A batch, or one half of it: some sequences of a step in batch order, and their own tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from ess.engine.layers.batch import Batch
from ess.overlap import tbo

PARTS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """`batch` has the tensors of these queries only. Its workspaces at the door are numbered from
    `first_workspace` on, `PARTS` for each half, so that two halves, which may be in different
    layers, never use the same workspace.
    """

    batch: Batch
    queries: range
    counts: tuple[int, ...]
    first_workspace: int = 0

    def parts(self, count: int) -> list[range]:
        """This half's queries in at most `count` parts, at most two; cut between sequences."""
        assert 1 <= count <= PARTS, f"{count} parts"
        assert sum(self.counts) == len(self.queries) > 0, f"{self.counts} are not {self.queries}"
        if count == 1 or len(self.counts) == 1:
            return [self.queries]
        cut = self.queries.start + sum(self.counts[: len(self.counts) // 2])
        assert self.queries.start < cut < self.queries.stop, f"an empty part of {self.queries}"
        return [range(self.queries.start, cut), range(cut, self.queries.stop)]

    def local(self, part: range) -> slice:
        """Where the part lies in this half's tensors."""
        first = self.queries.start
        assert first <= part.start < part.stop <= self.queries.stop, f"{part} of {self.queries}"
        return slice(part.start - first, part.stop - first)


def whole(batch: Batch) -> Half:
    counts = batch.course.counts
    return Half(batch=batch, queries=range(sum(counts)), counts=counts)


def half_tokens(counts: Sequence[int]) -> int:
    """The tokens of the larger half of a batch whose sequences bring `counts` queries.

    >>> half_tokens((2, 2, 2)), half_tokens((4,))
    (4, 4)
    """
    first = tbo.first_half(counts) if len(counts) > 1 else 0
    return max(sum(counts[:first]), sum(counts[first:]))


def halves(batch: Batch, first_count: int) -> tuple[Half | None, Half]:
    """The first sequences, and the others. The first half may be empty, if only another rank has
    requests for two halves."""
    counts = batch.course.counts
    assert 0 <= first_count < len(counts), f"{first_count} of {len(counts)} sequences are no half"
    if not first_count:
        return None, whole(batch)
    first = _side(batch, counts, 0, first_count, 0)
    return first, _side(batch, counts, first_count, len(counts), PARTS)


def _side(batch: Batch, counts: Sequence[int], start: int, stop: int, first_workspace: int) -> Half:
    ends = [0, *accumulate(counts)]
    queries = range(ends[start], ends[stop])
    assert 0 < len(queries) < ends[-1], f"{len(queries)} of {ends[-1]} queries are no half"
    mine = slice(queries.start, queries.stop)
    own = replace(
        batch,
        given=batch.places.part(mine),
        carried=batch.carried and batch.carried.part(mine),
        located={},
        selected={},
    )
    return Half(
        batch=own,
        queries=queries,
        counts=tuple(counts[start:stop]),
        first_workspace=first_workspace,
    )
