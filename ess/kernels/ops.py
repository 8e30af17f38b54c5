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
from ess.kernels import experts as routed
from ess.kernels.calls import (
    Angles,
    Attend,
    Backend,
    IndexQueries,
    KeyFinish,
    Keys,
    Linear,
    Products,
    RowFinish,
    slot_range,
)
from ess.kernels.checks import (
    BYTES,
    COUNTS,
    FLOATS,
    INT32,
    QUERIES,
    SINGLE,
    check_angles,
    check_linear,
    check_products,
    check_shared,
    check_threads,
    require,
    require_adjacent,
    require_dense,
    require_ends,
    require_readable,
    require_single,
    require_within,
)
from ess.kernels.merge import Pair, Partial, check_merge, like, side
from ess.kernels.reference import keys as paged
from ess.kernels.room import adjacent, empty, int32, new_partial, overlap, plain
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
        self.backend.encode_rows(adjacent(values), codec, out)
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
        return self.backend.encode_keys(adjacent(values), codec)

    def store_rows(self, values: Tensor, codec: RowCodec, out: Tensor, places: Tensor) -> None:
        """Values [n, latent + rope] into the rows out[places[i]]; places are unequal, and a
        negative one is nowhere."""
        self._check_whole(values, codec)
        places = self._places(out, codec, places, len(values))
        self.backend.store_rows(adjacent(values), codec, out, places)

    def store_keys(self, values: Tensor, codec: IndexCodec, pages: Tensor, row_ids: Tensor) -> None:
        """`encode_keys`, then `write_keys`, but that a negative row id is nowhere."""
        self._check("values", values, (None, codec.key_dim), FLOATS)
        row_ids = self._row_ids(pages, row_ids, codec, len(values))
        self.backend.store_keys(adjacent(values), codec, pages, row_ids)

    def finish_rows(
        self,
        values: Tensor,
        finish: RowFinish,
        codec: RowCodec,
        out: Tensor,
        places: Tensor | None = None,
    ) -> None:
        """Latents normed by their root mean square, the rope part rotated in pairs (2 i, 2 i + 1),
        both in float32; then as `store_rows`, or without places into the rows of `out` in turn."""
        self._check_whole(values, codec)
        count = len(values)
        require("finish.weight", finish.weight, (codec.latent_dim,), SINGLE)
        check_angles(finish.angles, count, low=codec.rope_dim, high=codec.rope_dim)
        if places is None:
            self._check_bytes("out", out, count, codec.row_bytes)
        else:
            places = self._places(out, codec, places, count)
        self.backend.finish_rows(adjacent(values), finish, codec, out, places)

    def finish_keys(
        self,
        values: Tensor,
        finish: KeyFinish,
        codec: IndexCodec,
        out: Tensor,
        row_ids: Tensor | None = None,
    ) -> None:
        """Keys normed to mean 0 and variance 1, their first numbers rotated, mixed where the codec
        says so; then as `store_keys` into pages, or without row ids into records [n, key_bytes]: a
        key's bytes, then its scale."""
        self._check("values", values, (None, codec.key_dim), FLOATS)
        count = len(values)
        for name, part in (("weight", finish.weight), ("bias", finish.bias)):
            require(f"finish.{name}", part, (codec.key_dim,), SINGLE)
        check_angles(finish.angles, count, low=0, high=codec.key_dim)
        if row_ids is None:
            self._check_bytes("out", out, count, codec.key_bytes)
        else:
            row_ids = self._row_ids(out, row_ids, codec, count)
        self.backend.finish_keys(adjacent(values), finish, codec, out, row_ids)

    def turn_queries(self, queries: Tensor, angles: Angles, codec: IndexCodec) -> Tensor:
        """Index queries [n, heads, key_dim] rotated and mixed as their keys: bfloat16 for keys in
        fp8, else float32."""
        self._check("queries", queries, (None, None, codec.key_dim), FLOATS)
        check_angles(angles, len(queries), low=0, high=codec.key_dim)
        return self.backend.turn_queries(adjacent(queries), angles, codec)

    def write_keys(self, pages: Tensor, row_ids: Tensor, keys: Keys, codec: IndexCodec) -> None:
        """Into pages [page, page_bytes]: 64 times the bytes of a value, then 64 scales."""
        self._check_row_ids(pages, row_ids, codec)
        self._check("keys.values", keys.values, (len(row_ids), codec.value_bytes), BYTES)
        self._check("keys.scales", keys.scales, (len(row_ids),), SINGLE)
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
        return self.backend.hadamard(values)

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
        balanced: bool = False,
        whole: bool = False,
        spares: bool = False,
        adds: bool = False,
    ) -> Partial:
        """Queries [q, heads, latent + rope] over the encoded rows that slots [q, width] name.

        A slot >= 0 names a row of `rows` [slot, row_bytes], -1 none, and -2 or less row -2 - slot
        of `placed`, which on CUDA may be pinned memory of the host. The key is the whole row, the
        value its latent part. A slot named twice counts twice. What no slot names may hold
        anything. Without a slot a query gets out = 0 and lse = -inf. With `adds`, `into` holds a
        partial over other rows and gets the one over both. On a device, `balanced`: bits may follow
        from the batch; `whole`: nothing runs beside it; `spares`: a copy does, and finds room.
        """
        require_readable(codec, self.name)
        self._check_bytes("rows", rows, None, codec.row_bytes)
        if placed is not None:
            self._check_bytes("placed", placed, None, codec.row_bytes, in_place=True)
        self._check("queries", queries, (None, None, codec.latent_dim + codec.rope_dim), QUERIES)
        count, heads, _ = queries.shape
        self._check("slots", slots, (count, None), COUNTS)
        check_threads(threads)
        if into is not None:
            side("into", into, torch.Size((count, heads, codec.latent_dim)))
            self._check_into(into)
        elif adds:
            raise BadInput("adds without the partial `into` that rows are added to")
        into = into or new_partial(queries, codec.latent_dim)
        slots = self._ids("slots", slots, *slot_range(rows, placed))
        given = plain(queries), rows, slots, codec, scale, placed, into
        self.backend.attend(Attend(*given, threads, balanced, whole, spares, adds))
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
        if into is not None:
            self._check_into(into)
        into = into or like(first)
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
            out = empty(queries, *shape)
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
        queries_per_request: int = 1,
    ) -> Tensor:
        """`index_logits`, then `top_k`. Queries of a request lie beside each other and name the
        same pages: a device reads their keys once. What each gets is what it would get alone."""
        call = self._index_queries(
            queries, weights, pages, page_table, lengths, codec, threads, queries_per_request
        )
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
        check_threads(threads)
        out = self._selection(logits, k, out)
        lengths = self._ids("lengths", lengths, 0, width + 1)
        self.backend.top_k(adjacent(logits), lengths, out, threads)
        return out

    # ---- experts

    def expert_products(
        self,
        tokens: Tensor,
        ends: Tensor,
        weights: Tensor,
        *,
        scales: Tensor | None = None,
        begin: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Tokens [n, depth] times the weights [experts, width, depth] of their experts: [n, width].

        Tokens are sorted by expert; those of expert e lie from ends[e - 1] up to ends[e], int32,
        and those of the first one from `begin` [1] on, by itself 0: the tokens before it, like
        those behind the last end, are not read, and `out` is left as it is there; without one it is
        made, zeros there, in the type of the tokens. Weights in e4m3 have a float32 scale for each
        128 x 128. Weights and scales are dense.
        """
        check_products(tokens, ends, weights, scales, out)
        if begin is not None:
            require("begin", begin, (1,), INT32)
        self._check_places(
            tokens=tokens, begin=begin, ends=ends, weights=weights, scales=scales, out=out
        )
        if self.backend.checked_before("ends", ends):
            first = 0 if begin is None else int(begin)
            require_ends(ends.tolist(), count=len(tokens), begin=first)
        if out is None:
            out = tokens.new_zeros(len(tokens), weights.shape[1])
        call = Products(adjacent(tokens), begin, ends.contiguous(), weights, scales, out)
        self.backend.expert_products(call)
        return out

    def experts(
        self,
        tokens: Tensor,
        chosen: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        *,
        gate_up_scales: Tensor | None = None,
        down_scales: Tensor | None = None,
    ) -> Tensor:
        """Each token's sum, float32 [n, depth], of what its experts make of it.

        `chosen` [n, per_token] names them ascending, int64; `weights` says how much each counts. An
        expert is gate_up [2 * inner, depth], silu of the first half times the second, then down
        [depth, inner]; in e4m3 both have scales, as `expert_products` takes them.
        """
        self._check("chosen", chosen, (len(tokens), None), (torch.int64,))
        self._check("weights", weights, tuple(chosen.shape), SINGLE)
        first, second = (gate_up, gate_up_scales), (down, down_scales)
        return routed.experts(self.expert_products, tokens, chosen, weights, first, second)

    # ---- dense products

    def linear_fp8(
        self, values: Tensor, weights: Tensor, scales: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """Values [n, depth] times weights [width, depth] in e4m3: [n, width], float32 by itself.

        Weights have a float32 scale for each 128 x 128. Values are rounded to e4m3 first, each 128
        of a line under a scale of their own, amax / 448.
        """
        check_linear(values, weights, scales, out)
        self._check_places(values=values, weights=weights, scales=scales, out=out)
        if out is None:
            out = empty(values, len(values), len(weights))
        self.backend.linear_fp8(Linear(adjacent(values), weights, scales, out))
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

    def _check_places(self, **given: Tensor | None) -> None:
        for name, tensor in given.items():
            if tensor is not None:
                self._check_place(name, tensor)

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
        require_readable(codec, self.name)
        self._check_bytes("rows", rows, None, codec.row_bytes)
        shape = rows.shape[0], codec.latent_dim + codec.rope_dim
        self._check("values", values, shape, FLOATS)
        if overlap(values, rows):
            raise BadInput("values and rows overlap in memory")

    def _check_whole(self, values: Tensor, codec: RowCodec) -> None:
        require_readable(codec, self.name)
        self._check("values", values, (None, codec.latent_dim + codec.rope_dim), FLOATS)

    def _places(self, out: Tensor, codec: RowCodec, places: Tensor, count: int) -> Tensor:
        self._check_bytes("out", out, None, codec.row_bytes)
        self._check("places", places, (count,), COUNTS)
        return self._ids("places", places, -(1 << 31), len(out))

    def _check_row_ids(self, pages: Tensor, row_ids: Tensor, codec: IndexCodec) -> None:
        self._check_bytes("pages", pages, None, codec.page_bytes)
        self._check("row_ids", row_ids, (None,), COUNTS)
        if self.backend.checked_before("row_ids", row_ids):
            require_within("row_ids", row_ids, low=0, limit=len(pages) * PAGE_ROWS)

    def _row_ids(self, pages: Tensor, row_ids: Tensor, codec: IndexCodec, count: int) -> Tensor:
        self._check_bytes("pages", pages, None, require_single(codec).page_bytes)
        self._check("row_ids", row_ids, (count,), COUNTS)
        return self._ids("row_ids", row_ids, -(1 << 31), len(pages) * PAGE_ROWS)

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
        queries_per_request: int = 1,
    ) -> IndexQueries:
        self._check_bytes("pages", pages, None, require_single(codec).page_bytes)
        self._check("queries", queries, (None, None, codec.key_dim), QUERIES)
        count, heads, _ = queries.shape
        self._check("weights", weights, (count, heads), SINGLE)
        self._check("page_table", page_table, (count, None), COUNTS)
        self._check("lengths", lengths, (count,), COUNTS)
        check_threads(threads)
        check_shared(count, queries_per_request)
        width = page_table.shape[1] * PAGE_ROWS
        lengths = self._ids("lengths", lengths, 0, width + 1)
        if self.backend.checked_before("page_table", page_table):
            starts = torch.arange(0, width, PAGE_ROWS, device=page_table.device)
            seen = page_table[starts < lengths[:, None]]
            require_within("page_table", seen, low=0, limit=len(pages))
        return IndexQueries(
            *(plain(queries), weights.contiguous(), pages, int32(page_table), lengths),
            *(codec, threads, queries_per_request),
        )

    def _selection(self, queries: Tensor, k: int, out: Tensor | None) -> Tensor:
        """Room for k positions of each query."""
        if k < 1:
            raise BadInput(f"k is {k}, must be positive")
        count = queries.shape[0]
        if out is None:
            return empty(queries, count, k, dtype=torch.int32)
        self._check("out", out, (count, k), INT32)
        require_dense("out", out)
        return out

    def _ids(self, name: str, ids: Tensor, low: int, limit: int) -> Tensor:
        if self.backend.checked_before(name, ids):
            require_within(name, ids, low=low, limit=limit)
        return int32(ids)
