"""The ops, each in one place: its signature, its contract, its checks, the room for its result.

`Ops` checks the arguments, brings them into the form that `ess.kernels.calls` describes and hands
them to a backend, which trusts them. A call that is refused has changed nothing.

Matrices of bytes (rows, pages) hold the bytes of a row side by side and start every row at a
multiple of 4; rows may lie any distance apart. Results that the caller brings are written in place
and returned. Other tensors may have any strides: what is not dense is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ess.errors import BadInput
from ess.kernels.calls import Attend, Backend, IndexQueries, Keys, Products, slot_range
from ess.kernels.checks import (
    BYTES,
    COUNTS,
    FLOATS,
    INT32,
    QUERIES,
    SINGLE,
    check_products,
    require,
    require_adjacent,
    require_dense,
    require_ends,
    require_within,
)
from ess.kernels.merge import Pair, Partial, check_merge
from ess.kernels.reference import keys as paged
from ess.layout import IndexCodec, RowCodec
from ess.units import PAGE_ROWS


@dataclass(frozen=True, slots=True)
class Ops:
    """The ops of one backend. What a query, a token or a row gets depends on no other of its kind.

    `threads` is for the CPU: how many may share the call; their number changes no bit.
    """

    name: str
    backend: Backend

    def implementation(self) -> str:
        """What runs on this machine, for people."""
        return self.backend.implementation()

    def has_stages(self) -> bool:
        """Whether `ess.kernels.cpu.stage` runs here; without it stages run op by op in torch."""
        return self.backend.has_stages()

    # ---- rows and keys to bytes and back

    def encode_rows(self, values: Tensor, codec: RowCodec, out: Tensor) -> Tensor:
        """Values [n, latent + rope], float32 or bfloat16, into rows [n, row_bytes]."""
        self._check_rows(values, codec, out)
        self.backend.encode_rows(_adjacent(values), codec, out)
        return out

    def decode_rows(self, rows: Tensor, codec: RowCodec, out: Tensor) -> Tensor:
        """Rows [n, row_bytes] into values [n, latent + rope], float32 or bfloat16."""
        self._check_rows(out, codec, rows)
        require_adjacent("values", out)
        self.backend.decode_rows(rows, codec, out)
        return out

    def encode_keys(self, values: Tensor, codec: IndexCodec) -> Keys:
        """Keys [n, key_dim], float32 or bfloat16; the float32 form keeps them, with scale 1."""
        self._check("values", values, (None, codec.key_dim), FLOATS)
        return self.backend.encode_keys(_adjacent(values), codec)

    def write_keys(self, pages: Tensor, row_ids: Tensor, keys: Keys, codec: IndexCodec) -> None:
        """Into pages [page, page_bytes]: 64 times the bytes of a value, then 64 scales."""
        self._check_row_ids(pages, row_ids, codec)
        count = len(row_ids)
        self._check("keys.values", keys.values, (count, codec.value_bytes), BYTES)
        self._check("keys.scales", keys.scales, (count,), SINGLE)
        paged.write_keys(pages, row_ids, keys, codec)

    def read_keys(self, pages: Tensor, row_ids: Tensor, codec: IndexCodec) -> Keys:
        """What `write_keys` wrote under these ids."""
        self._check_row_ids(pages, row_ids, codec)
        return paged.read_keys(pages, row_ids, codec)

    def hadamard(self, values: Tensor) -> Tensor:
        """Orthonormal Walsh-Hadamard transform of the last axis, in float32; its own inverse."""
        size = values.shape[-1]
        if size < 1 or size & (size - 1):
            raise BadInput(f"a Hadamard transform needs a power of two, got {size}")
        return paged.hadamard(values)

    # ---- attention

    def attend(
        self,
        queries: Tensor,
        rows: Tensor,
        slots: Tensor,
        codec: RowCodec,
        *,
        scale: float,
        placed: Tensor | None = None,
        into: Partial | None = None,
        threads: int = 1,
    ) -> Partial:
        """Queries [q, heads, latent + rope] over the encoded rows that slots [q, width] name.

        A slot >= 0 names a row of `rows` [slot, row_bytes], -1 none, and -2 or less row -2 - slot
        of `placed`, which on CUDA may be pinned memory of the host. The key is the whole row, the
        value its latent part. A slot named twice counts twice. What no slot names may hold
        anything. Without a slot a query gets out = 0 and lse = -inf.
        """
        if codec.form == "opaque":
            raise BadInput("an opaque row is attended by its owner only")
        self._check_bytes("rows", rows, None, codec.row_bytes)
        if placed is not None:
            self._check_bytes("placed", placed, None, codec.row_bytes, in_place=True)
        self._check("queries", queries, (None, None, codec.latent_dim + codec.rope_dim), QUERIES)
        count, heads, _ = queries.shape
        self._check("slots", slots, (count, None), COUNTS)
        _check_threads(threads)
        if into is None:
            into = _new_partial(queries, codec.latent_dim)
        else:
            require("into.out", into.out, (count, heads, codec.latent_dim), SINGLE)
            require("into.lse", into.lse, (count, heads), SINGLE)
            self._check_into(into)
        slots = self._ids("slots", slots, *slot_range(rows, placed))
        self.backend.attend(
            Attend(_plain(queries), rows, slots, codec, scale, placed, into, threads)
        )
        return into

    def merge(self, first: Pair, second: Pair, *, into: Partial | None = None) -> Partial:
        """Two partials over disjoint parts of a selection make one: `ess.kernels.merge` says how.
        `into` may be one of them."""
        first, second = check_merge(first, second, into)
        for name, tensor in (("first", first.lse), ("second", second.lse)):
            self._check_place(name, tensor)
        first, second = (
            Partial(out.contiguous(), lse.contiguous()) for out, lse in (first, second)
        )
        if into is None:
            into = Partial(torch.empty_like(first.out), torch.empty_like(first.lse))
        else:
            self._check_into(into)
        self.backend.merge(first, second, into)
        return into

    # ---- the indexer

    def index_logits(
        self,
        queries: Tensor,
        weights: Tensor,
        pages: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        codec: IndexCodec,
        *,
        out: Tensor | None = None,
        threads: int = 1,
    ) -> Tensor:
        """Logits [q, 64 * table width]: key scale * sum over heads of weight * relu(query . key).

        Query q sees the first lengths[q] positions of the pages in page_table[q]; -inf is beyond
        them. Query scales belong in the weights.
        """
        call = self._index_queries(queries, weights, pages, page_table, lengths, codec, threads)
        shape = queries.shape[0], call.width
        if out is None:
            out = _empty(queries, *shape)
        else:
            self._check("out", out, shape, SINGLE)
            require_adjacent("out", out)
        self.backend.index_logits(call, out)
        return out

    def index_top_k(
        self,
        queries: Tensor,
        weights: Tensor,
        pages: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        codec: IndexCodec,
        *,
        k: int,
        out: Tensor | None = None,
        threads: int = 1,
    ) -> Tensor:
        """`index_logits`, then `top_k`."""
        call = self._index_queries(queries, weights, pages, page_table, lengths, codec, threads)
        out = self._selection(queries, k, out)
        self.backend.index_top_k(call, out)
        return out

    def top_k(
        self,
        logits: Tensor,
        lengths: Tensor,
        *,
        k: int,
        out: Tensor | None = None,
        threads: int = 1,
    ) -> Tensor:
        """The positions [q, k] of the k greatest of the first lengths[q] logits, ascending, then
        -1, int32.

        Equal logits go to the lowest position first. NaN counts as the greatest, so it is seen.
        """
        self._check("logits", logits, (None, None), SINGLE)
        count, width = logits.shape
        self._check("lengths", lengths, (count,), COUNTS)
        _check_threads(threads)
        out = self._selection(logits, k, out)
        lengths = self._ids("lengths", lengths, 0, width + 1)
        self.backend.top_k(_adjacent(logits), lengths, out, threads)
        return out

    # ---- experts

    def expert_products(
        self,
        tokens: Tensor,
        ends: Tensor,
        weights: Tensor,
        *,
        scales: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Tokens [n, depth] times the weights [experts, width, depth] of their experts: [n, width].

        Tokens are sorted by expert; those of expert e lie from ends[e - 1] up to ends[e], int32.
        What lies behind the last end is not read, and `out` is left as it is there; without one it
        is made, zeros there, in the type of the tokens. Weights in e4m3 have a float32 scale for
        each 128 x 128. Weights and scales are dense.
        """
        check_products(tokens, ends, weights, scales, out)
        given = {"tokens": tokens, "ends": ends, "weights": weights, "scales": scales, "out": out}
        for name, tensor in given.items():
            if tensor is not None:
                self._check_place(name, tensor)
        if self.backend.checked_before("ends", ends):
            require_ends(ends.tolist(), count=len(tokens))
        if out is None:
            out = tokens.new_zeros(len(tokens), weights.shape[1])
        call = Products(_adjacent(tokens), ends.contiguous(), weights, scales, out)
        self.backend.expert_products(call)
        return out

    # ---- the checks

    def _check(
        self,
        name: str,
        tensor: Any,
        shape: Sequence[int | None],
        dtypes: Sequence[torch.dtype],
        in_place: bool = False,
    ) -> None:
        require(name, tensor, shape, dtypes)
        self._check_place(name, tensor, in_place)

    def _check_place(self, name: str, tensor: Tensor, in_place: bool = False) -> None:
        if not self.backend.reaches(tensor, in_place=in_place):
            raise BadInput(f"{name} is on {tensor.device}: the {self.name} ops do not reach it")

    def _check_bytes(
        self, name: str, matrix: Any, count: int | None, width: int, in_place: bool = False
    ) -> None:
        self._check(name, matrix, (count, width), BYTES, in_place)
        require_adjacent(name, matrix)
        apart, start = matrix.stride()[0], matrix.data_ptr()
        if (apart | start) % 4:
            raise BadInput(
                f"{name} has rows {apart} bytes apart from {start:#x} on: not words of 4"
            )

    def _check_rows(self, values: Tensor, codec: RowCodec, rows: Tensor) -> None:
        if codec.form == "opaque":
            raise BadInput("an opaque row is read and written by its owner only")
        self._check_bytes("rows", rows, None, codec.row_bytes)
        shape = rows.shape[0], codec.latent_dim + codec.rope_dim
        self._check("values", values, shape, FLOATS)
        if _overlap(values, rows):
            raise BadInput("values and rows overlap in memory")

    def _check_row_ids(self, pages: Tensor, row_ids: Tensor, codec: IndexCodec) -> None:
        self._check_bytes("pages", pages, None, codec.page_bytes)
        self._check("row_ids", row_ids, (None,), COUNTS)
        if self.backend.checked_before("row_ids", row_ids):
            require_within("row_ids", row_ids, low=0, limit=len(pages) * PAGE_ROWS)

    def _check_into(self, into: Partial) -> None:
        for name, tensor in zip(("into.out", "into.lse"), into, strict=True):
            self._check_place(name, tensor)
            require_dense(name, tensor)

    def _index_queries(
        self,
        queries: Tensor,
        weights: Tensor,
        pages: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        codec: IndexCodec,
        threads: int,
    ) -> IndexQueries:
        self._check_bytes("pages", pages, None, codec.page_bytes)
        self._check("queries", queries, (None, None, codec.key_dim), QUERIES)
        count, heads, _ = queries.shape
        self._check("weights", weights, (count, heads), SINGLE)
        self._check("page_table", page_table, (count, None), COUNTS)
        self._check("lengths", lengths, (count,), COUNTS)
        _check_threads(threads)
        width = page_table.shape[1] * PAGE_ROWS
        lengths = self._ids("lengths", lengths, 0, width + 1)
        if self.backend.checked_before("page_table", page_table):
            starts = torch.arange(0, width, PAGE_ROWS, device=page_table.device)
            seen = page_table[starts < lengths[:, None]]
            require_within("page_table", seen, low=0, limit=len(pages))
        return IndexQueries(
            *(_plain(queries), weights.contiguous(), pages, _int32(page_table), lengths),
            *(codec, threads),
        )

    def _selection(self, queries: Tensor, k: int, out: Tensor | None) -> Tensor:
        """Room for k positions of each query."""
        if k < 1:
            raise BadInput(f"k is {k}, must be positive")
        count = queries.shape[0]
        if out is None:
            return _empty(queries, count, k, dtype=torch.int32)
        self._check("out", out, (count, k), INT32)
        require_dense("out", out)
        return out

    def _ids(self, name: str, ids: Tensor, low: int, limit: int) -> Tensor:
        if self.backend.checked_before(name, ids):
            require_within(name, ids, low=low, limit=limit)
        return _int32(ids)


def _check_threads(threads: int) -> None:
    if threads < 1:
        raise BadInput(f"threads is {threads}, must be positive")


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Of two matrices: whether one starts within the memory that the other spans."""
    low, ahead = first, second.data_ptr() - first.data_ptr()
    if ahead < 0:
        low, ahead = second, -ahead
    (count, width), (row_step, step) = low.shape, low.stride()
    return ahead < ((count - 1) * row_step + (width - 1) * step + 1) * low.itemsize


def _new_partial(queries: Tensor, dim: int) -> Partial:
    count, heads, _ = queries.shape
    return Partial(_empty(queries, count, heads, dim), _empty(queries, count, heads))


def _empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    if like.is_cpu:  # naming the device, or sizes in a tuple, takes half as long again
        return torch.empty(*shape, dtype=dtype)
    return torch.empty(shape, dtype=dtype, device=like.device)


def _adjacent(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride()[-1] == 1 else tensor.contiguous()


def _plain(queries: Tensor) -> Tensor:
    return _adjacent(queries.float() if queries.dtype == torch.float64 else queries)


def _int32(ids: Tensor) -> Tensor:
    return _adjacent(ids if ids.dtype == torch.int32 else ids.to(torch.int32))
