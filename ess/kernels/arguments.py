"""The arguments of one backend's ops: checked, then in the form that `ess.kernels.calls` describes.

Where a check looks at ids, which on a device would wait for it, the backend says whether it does so
itself (`Backend.checked_before`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ess.errors import BadInput
from ess.kernels.calls import Backend, IndexQueries
from ess.kernels.checks import (
    BYTES,
    COUNTS,
    FLOATS,
    INT32,
    QUERIES,
    SINGLE,
    check_shared,
    check_threads,
    require,
    require_adjacent,
    require_dense,
    require_readable,
    require_single,
    require_within,
)
from ess.kernels.merge import Partial
from ess.kernels.room import empty, int32, overlap, plain
from ess.layout import IndexCodec, RowCodec
from ess.units import PAGE_ROWS


@dataclass(frozen=True, slots=True)
class Checks:
    """`name` and `backend` are those of the ops."""

    name: str
    backend: Backend

    def tensor(
        self,
        name: str,
        tensor: Any,
        shape: Sequence[int | None],
        dtypes: Sequence[torch.dtype],
        *,
        in_place: bool = False,
    ) -> None:
        require(name, tensor, shape, dtypes)
        self.place(name, tensor, in_place=in_place)

    def place(self, name: str, tensor: Tensor, *, in_place: bool = False) -> None:
        if not self.backend.reaches(tensor, in_place=in_place):
            raise BadInput(f"{name} is on {tensor.device}: the {self.name} ops do not reach it")

    def places(self, **given: Tensor | None) -> None:
        for name, tensor in given.items():
            if tensor is not None:
                self.place(name, tensor)

    def bytes_of(
        self, name: str, matrix: Any, count: int | None, width: int, *, in_place: bool = False
    ) -> None:
        self.tensor(name, matrix, (count, width), BYTES, in_place=in_place)
        require_adjacent(name, matrix)
        apart, start = matrix.stride()[0], matrix.data_ptr()
        if (apart | start) % 4:
            raise BadInput(
                f"{name} has rows {apart} bytes apart from {start:#x} on: not words of 4"
            )

    def rows(self, values: Tensor, codec: RowCodec, rows: Tensor) -> None:
        require_readable(codec, self.name)
        self.bytes_of("rows", rows, None, codec.row_bytes)
        shape = rows.shape[0], codec.latent_dim + codec.rope_dim
        self.tensor("values", values, shape, FLOATS)
        if overlap(values, rows):
            raise BadInput("values and rows overlap in memory")

    def whole(self, values: Tensor, codec: RowCodec) -> None:
        require_readable(codec, self.name)
        self.tensor("values", values, (None, codec.latent_dim + codec.rope_dim), FLOATS)

    def row_places(self, out: Tensor, codec: RowCodec, places: Tensor, count: int) -> Tensor:
        self.bytes_of("out", out, None, codec.row_bytes)
        self.tensor("places", places, (count,), COUNTS)
        return self.ids("places", places, -(1 << 31), len(out))

    def check_row_ids(self, pages: Tensor, row_ids: Tensor, codec: IndexCodec) -> None:
        self.bytes_of("pages", pages, None, codec.page_bytes)
        self.tensor("row_ids", row_ids, (None,), COUNTS)
        if self.backend.checked_before("row_ids", row_ids):
            require_within("row_ids", row_ids, low=0, limit=len(pages) * PAGE_ROWS)

    def row_ids(self, pages: Tensor, row_ids: Tensor, codec: IndexCodec, count: int) -> Tensor:
        self.bytes_of("pages", pages, None, require_single(codec).page_bytes)
        self.tensor("row_ids", row_ids, (count,), COUNTS)
        return self.ids("row_ids", row_ids, -(1 << 31), len(pages) * PAGE_ROWS)

    def into(self, into: Partial) -> None:
        for name, tensor in zip(("into.out", "into.lse"), into, strict=True):
            self.place(name, tensor)
            require_dense(name, tensor)

    def index_queries(self, asked: IndexQueries) -> IndexQueries:
        queries, weights, pages, page_table, lengths, codec, threads, each = asked
        self.bytes_of("pages", pages, None, require_single(codec).page_bytes)
        self.tensor("queries", queries, (None, None, codec.key_dim), QUERIES)
        count, heads, _ = queries.shape
        self.tensor("weights", weights, (count, heads), SINGLE)
        self.tensor("page_table", page_table, (count, None), COUNTS)
        self.tensor("lengths", lengths, (count,), COUNTS)
        check_threads(threads)
        check_shared(count, each)
        lengths = self.ids("lengths", lengths, 0, asked.width + 1)
        if self.backend.checked_before("page_table", page_table):
            starts = torch.arange(0, asked.width, PAGE_ROWS, device=page_table.device)
            seen = page_table[starts < lengths[:, None]]
            require_within("page_table", seen, low=0, limit=len(pages))
        return IndexQueries(
            *(plain(queries), weights.contiguous(), pages, int32(page_table), lengths),
            *(codec, threads, each),
        )

    def selection(self, queries: Tensor, k: int, out: Tensor | None) -> Tensor:
        """Room for k positions of each query."""
        if k < 1:
            raise BadInput(f"k is {k}, must be positive")
        count = queries.shape[0]
        if out is None:
            return empty(queries, count, k, dtype=torch.int32)
        self.tensor("out", out, (count, k), INT32)
        require_dense("out", out)
        return out

    def ids(self, name: str, ids: Tensor, low: int, limit: int) -> Tensor:
        if self.backend.checked_before(name, ids):
            require_within(name, ids, low=low, limit=limit)
        return int32(ids)
