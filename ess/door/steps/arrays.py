"""What a step knows of each of its queries, as arrays: on the host here, on a device elsewhere."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ess.array_types import Ints
from ess.door.checks import as_array, kept_counts
from ess.errors import BadInput
from ess.kernels.cpu import native, step
from ess.pool.index import PageTables

Array: TypeAlias = Any
Kept: TypeAlias = list[int] | Tensor
"""How many rows of each sequence are kept; a tensor where only the device knows yet."""


@dataclass(frozen=True, slots=True)
class Brought:
    """Counts of a step whose rows are of `rate` tokens: how many tokens each sequence had before;
    how many new rows it brings, those whose last token is among its queries'; and how many of them
    each query may select, behind all rows before them."""

    texts: list[int]
    row_counts: list[int]
    seen_counts: list[int]
    rate: int

    @classmethod
    def of(cls, texts: list[int], query_counts: Many[int], rate: int) -> Brought:
        seen = [
            [(text + number + 1) // rate - text // rate for number in range(count)]
            for text, count in zip(texts, query_counts, strict=True)
        ]
        rows = [each[-1] for each in seen]
        return cls(texts, rows, [count for each in seen for count in each], rate)

    @property
    def ends(self) -> list[int]:
        """Behind the last new row of each sequence. Texts are those that the steps before have
        made, also before the host learns these: so no row of a rejected draft counts."""
        pairs = zip(self.texts, self.row_counts, strict=True)
        return [text // self.rate + count for text, count in pairs]

    def rows_of(self, accepted: Many[int]) -> list[int]:
        """How many new rows each sequence keeps with its first `accepted` tokens."""
        rate = self.rate
        pairs = zip(self.texts, accepted, strict=True)
        return [(text + count) // rate - text // rate for text, count in pairs]


def rows_of(brought: Brought | None, kept: Kept) -> Kept:
    """How many new rows are kept with the `kept` tokens. A device already counts rows, not
    tokens."""
    if brought is None or not isinstance(kept, list):
        return kept
    return brought.rows_of(kept)


class StepArrays(Protocol):
    """The arrays of `Step`: int32, with an entry for each query or new row; and the operations on
    them."""

    query_line: Array
    query_offset: Array
    query_start: Array
    query_stop: Array
    row_ids: Array
    row_offset: Array

    @property
    def positions(self) -> Array:
        """The position of each query's token in its sequence's text."""

    def page_table(self) -> Tensor:
        """[queries, pages] active pages, -1 padded."""

    def lengths(self, appended_count: int) -> Array:
        """How many rows each query may select from once `appended_count` new rows are appended."""

    def given(self, value: Any, name: str, dtype: str, shape: tuple[int | None, ...]) -> Array:
        """What a verb was given, checked for place, type and shape."""

    def kept(self, accepted: Any, row_counts: Many[int]) -> Kept:
        """What `seal` was given, checked."""

    def sealed(self, kept: Kept) -> None:
        """The device's own lengths grow."""

    def learned(self, kept: list[int], *, number: int) -> None:
        """The host knows now. BadInput where step `number` was sealed with other counts."""


class HostArrays:
    """The arrays of a step over `lines` of these tables; the k-th line brings `query_counts[k]`
    rows, or what `brought` says."""

    def __init__(
        self,
        tables: PageTables,
        lines: list[int],
        query_counts: Many[int],
        brought: Brought | None = None,
    ) -> None:
        self._tables = tables
        self._lines = lines
        self._kept: list[int] | None = None
        self._new_rows: _NewRows | None = None
        self._brought = brought
        if brought is None and native.available():
            self._take(query_counts)
            return
        sequence_of, offset = places(query_counts)
        self.query_line: Ints = np.array(lines, np.int32)[sequence_of]
        self.query_offset: Ints = offset
        self.query_start: Ints = tables.lengths[self.query_line]
        assert (self.query_start >= 0).all(), "a line without a length"
        positions = self.query_start + self.query_offset
        self.positions: Ints = positions
        self.query_stop: Ints = positions + np.int32(1)
        self.row_offset: Ints = self.query_offset
        row_lines = self.query_line
        if brought is not None:
            self._new_rows = rows = _NewRows.of(brought, sequence_of)
            self.query_stop = self.query_start + rows.seen
            self.row_offset, row_lines = rows.offset, np.array(lines, np.int32)[rows.sequence_of]
            positions = tables.lengths[row_lines] + self.row_offset
            self.positions = np.array(brought.texts, np.int32)[sequence_of] + offset
        self.row_ids: Ints = tables.rows_at(row_lines, positions)

    def _take(self, query_counts: Many[int]) -> None:
        """Takes the arrays from native code, for steps in which each query brings a row."""
        tables = self._tables
        arrays = step.places(tables.lines, tables.lengths, self._lines, query_counts)
        assert arrays is not None, f"no length or no page for one of lines {self._lines}"
        self.query_line, self.query_offset, self.query_start, self.positions = arrays[:4]
        self.query_stop, self.row_ids = arrays[4:]
        self.row_offset = self.query_offset

    def page_table(self) -> Tensor:
        return torch.from_numpy(self._tables.lines[self.query_line])

    def lengths(self, appended_count: int) -> Ints:
        if appended_count == len(self.row_ids):
            return self.query_stop
        if self._new_rows is not None:
            return self.query_start + self._new_rows.seen_of(appended_count)
        lengths = self.query_start.copy()
        lengths[:appended_count] += self.query_offset[:appended_count] + np.int32(1)
        return lengths

    def given(self, value: Any, name: str, dtype: str, shape: tuple[int | None, ...]) -> Array:
        return as_array(value, name, dtype, shape)

    def kept(self, accepted: Any, row_counts: Many[int]) -> list[int]:
        return kept_counts(accepted, row_counts)

    def sealed(self, kept: Kept) -> None:
        assert isinstance(kept, list), "the host's step is sealed with numbers"
        rows = kept if self._brought is None else self._brought.rows_of(kept)
        self._tables.advance(self._lines, rows)
        if self._brought is not None:
            self._tables.advance_texts(self._lines, kept)
        self._kept = kept

    def learned(self, kept: list[int], *, number: int) -> None:
        require_same(kept, self._kept, number=number)


@dataclass(frozen=True, slots=True)
class _NewRows:
    """Each new row's sequence and its place among the new rows of that sequence; each query's
    sequence and how many new rows of that sequence it may select."""

    sequence_of: npt.NDArray[np.int64]
    offset: Ints
    query_sequence: npt.NDArray[np.int64]
    seen: Ints

    @classmethod
    def of(cls, brought: Brought, query_sequence: npt.NDArray[np.int64]) -> _NewRows:
        seen = np.array(brought.seen_counts, np.int32)
        return cls(*places(brought.row_counts), query_sequence, seen)

    def seen_of(self, appended_count: int) -> Ints:
        """The same, as if the step had only its first `appended_count` rows."""
        sequence_count = int(self.query_sequence[-1]) + 1
        counts = np.bincount(self.sequence_of[:appended_count], minlength=sequence_count)
        return np.minimum(self.seen, counts[self.query_sequence].astype(np.int32))


def places(query_counts: Many[int]) -> tuple[npt.NDArray[np.int64], Ints]:
    """Each query's or row's sequence in the batch, and its place in that sequence."""
    firsts = np.cumsum([0, *query_counts[:-1]]).astype(np.int32)
    sequence_of = np.repeat(np.arange(len(query_counts)), query_counts)
    offset: Ints = np.arange(len(sequence_of), dtype=np.int32) - firsts[sequence_of]
    return sequence_of, offset


def require_same(kept: list[int], sealed: list[int] | None, *, number: int) -> None:
    if kept != sealed:
        raise BadInput(f"accepted is {kept}, step {number} was sealed with {sealed}")
