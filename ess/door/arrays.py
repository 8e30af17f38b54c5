"""What a step knows of each of its queries, as arrays: on the host here, on a device elsewhere."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ess.door.checks import as_array, kept_counts
from ess.errors import BadInput
from ess.pool.index import PageTables

Array: TypeAlias = Any
Kept: TypeAlias = list[int] | Tensor
"""How many rows of each sequence are kept; a tensor where only the device knows yet."""
Ints = npt.NDArray[np.int32]


class StepArrays(Protocol):
    """The arrays of `Step`, int32 with an entry for each query, and what is done with them."""

    query_line: Array
    query_offset: Array
    query_start: Array
    query_stop: Array
    row_ids: Array

    def page_table(self) -> Tensor:
        """[queries, pages] active pages, -1 padded."""

    def lengths(self, appended_count: int) -> Array:
        """What each query may select from when so many of the queries have been appended."""

    def given(self, value: Any, name: str, dtype: str, shape: tuple[int | None, ...]) -> Array:
        """What a verb was given, checked for place, type and shape."""

    def kept(self, accepted: Any, query_counts: Many[int]) -> Kept:
        """What `seal` was given, checked."""

    def sealed(self, kept: Kept) -> None:
        """The device's own lengths grow."""

    def learned(self, kept: list[int], *, number: int) -> None:
        """The host knows now. BadInput where step `number` was sealed with other counts."""


class HostArrays:
    """Of a step over `lines` of these tables; the k-th brings `query_counts[k]` rows."""

    def __init__(self, tables: PageTables, lines: list[int], query_counts: Many[int]) -> None:
        sequence_of, offset = places(query_counts)
        self._tables = tables
        self._lines = lines
        self._kept: list[int] | None = None
        self.query_line: Ints = np.array(lines, np.int32)[sequence_of]
        self.query_offset: Ints = offset
        self.query_start: Ints = tables.lengths[self.query_line]
        assert (self.query_start >= 0).all(), "a line without a length"
        positions = self.query_start + self.query_offset
        self.query_stop: Ints = positions + np.int32(1)
        self.row_ids: Ints = tables.rows_at(self.query_line, positions)

    def page_table(self) -> Tensor:
        return torch.from_numpy(self._tables.lines[self.query_line])

    def lengths(self, appended_count: int) -> Ints:
        if appended_count == len(self.query_stop):
            return self.query_stop
        lengths = self.query_start.copy()
        lengths[:appended_count] += self.query_offset[:appended_count] + np.int32(1)
        return lengths

    def given(self, value: Any, name: str, dtype: str, shape: tuple[int | None, ...]) -> Array:
        return as_array(value, name, dtype, shape)

    def kept(self, accepted: Any, query_counts: Many[int]) -> list[int]:
        return kept_counts(accepted, query_counts)

    def sealed(self, kept: Kept) -> None:
        assert isinstance(kept, list), "the host's step is sealed with numbers"
        self._tables.advance(self._lines, kept)
        self._kept = kept

    def learned(self, kept: list[int], *, number: int) -> None:
        require_same(kept, self._kept, number=number)


def places(query_counts: Many[int]) -> tuple[npt.NDArray[np.int64], Ints]:
    """Of each query: which sequence of the batch it is of, and its place among that one's."""
    firsts = np.cumsum([0, *query_counts[:-1]]).astype(np.int32)
    sequence_of = np.repeat(np.arange(len(query_counts)), query_counts)
    offset: Ints = np.arange(len(sequence_of), dtype=np.int32) - firsts[sequence_of]
    return sequence_of, offset


def require_same(kept: list[int], sealed: list[int] | None, *, number: int) -> None:
    if kept != sealed:
        raise BadInput(f"accepted is {kept}, step {number} was sealed with {sealed}")
