"""The ops, each in one place: its signature, its contract, its checks, the room for its result.

`Ops` checks the arguments, brings them into the form that `ess.kernels.calls` describes and hands
them to a backend, which trusts them. A call that is refused has changed nothing.

Matrices of bytes (rows, pages) hold the bytes of a row side by side and start every row at a
multiple of 4; rows may lie any distance apart. Results that the caller brings are written in place
and returned. Other tensors may have any strides: what is not dense is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ess.errors import BadInput
from ess.kernels.arguments import Checks
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
    check_threads,
    require,
    require_adjacent,
    require_ends,
    require_readable,
)
from ess.kernels.merge import Pair, Partial, check_merge, like, side
from ess.kernels.reference import keys as paged
from ess.kernels.room import adjacent, empty, new_partial, plain
from ess.layout import IndexCodec, RowCodec


@dataclass(frozen=True, slots=True)
class Ops:
    """The ops of one backend. What a query, a token or a row gets depends on no other of its kind.

    `threads` is for the CPU: how many may share the call; their number changes no bit.
    """

    name: str
    backend: Backend
    checks: Checks = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "checks", Checks(self.name, self.backend))

    def implementation(self) -> str:
        """What runs on this machine, for people."""
        return self.backend.implementation()

    def has_stages(self) -> bool:
        """Whether `ess.kernels.cpu.stage` runs here; without it stages run op by op in torch."""
        return self.backend.has_stages()

    # ---- rows and keys to bytes and back

    def encode_rows(self, values: Tensor, codec: RowCodec, out: Tensor) -> Tensor:
        """Values [n, latent + rope], float32 or bfloat16, into rows [n, row_bytes]."""
        self.checks.rows(values, codec, out)
        self.backend.encode_rows(adjacent(values), codec, out)
        return out

    def decode_rows(self, rows: Tensor, codec: RowCodec, out: Tensor) -> Tensor:
        """Rows [n, row_bytes] into values [n, latent + rope], float32 or bfloat16."""
        self.checks.rows(out, codec, rows)
        require_adjacent("values", out)
        self.backend.decode_rows(rows, codec, out)
        return out

    def encode_keys(self, values: Tensor, codec: IndexCodec) -> Keys:
        """Keys [n, key_dim], float32 or bfloat16; the float32 form keeps them, with scale 1."""
        self.checks.tensor("values", values, (None, codec.key_dim), FLOATS)
        return self.backend.encode_keys(adjacent(values), codec)

    def store_rows(self, values: Tensor, codec: RowCodec, out: Tensor, places: Tensor) -> None:
        """Values [n, latent + rope] into the rows out[places[i]]; places are unequal, and a
        negative one is nowhere."""
        self.checks.whole(values, codec)
        places = self.checks.row_places(out, codec, places, len(values))
        self.backend.store_rows(adjacent(values), codec, out, places)

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
        self.checks.whole(values, codec)
        count = len(values)
        require("finish.weight", finish.weight, (codec.latent_dim,), SINGLE)
        check_angles(finish.angles, count, low=codec.rope_dim, high=codec.rope_dim)
        if places is None:
            self.checks.bytes_of("out", out, count, codec.row_bytes)
        else:
            places = self.checks.row_places(out, codec, places, count)
        self.backend.finish_rows(adjacent(values), finish, codec, out, places)

    def finish_keys(
        self,
        values: Tensor,
        finish: KeyFinish,
        codec: IndexCodec,
        out: Tensor,
        row_ids: Tensor | None = None,
    ) -> None:
        """Norms keys to mean 0 and variance 1, rotates their first numbers, and mixes them where
        the codec says so. Then writes them into pages, as `write_keys` does, but not those with a
        negative row id; without row ids into records [n, key_bytes]: a key's bytes, its scale."""
        self.checks.tensor("values", values, (None, codec.key_dim), FLOATS)
        count = len(values)
        for name, part in (("weight", finish.weight), ("bias", finish.bias)):
            require(f"finish.{name}", part, (codec.key_dim,), SINGLE)
        check_angles(finish.angles, count, low=0, high=codec.key_dim)
        if row_ids is None:
            self.checks.bytes_of("out", out, count, codec.key_bytes)
        else:
            row_ids = self.checks.row_ids(out, row_ids, codec, count)
        self.backend.finish_keys(adjacent(values), finish, codec, out, row_ids)

    def turn_queries(self, queries: Tensor, angles: Angles, codec: IndexCodec) -> Tensor:
        """Index queries [n, heads, key_dim] rotated and mixed as their keys: bfloat16 for keys in
        fp8, else float32."""
        self.checks.tensor("queries", queries, (None, None, codec.key_dim), FLOATS)
        check_angles(angles, len(queries), low=0, high=codec.key_dim)
        return self.backend.turn_queries(adjacent(queries), angles, codec)

    def write_keys(self, pages: Tensor, row_ids: Tensor, keys: Keys, codec: IndexCodec) -> None:
        """Into pages [page, page_bytes]: 64 times the bytes of a value, then 64 scales."""
        self.checks.check_row_ids(pages, row_ids, codec)
        self.checks.tensor("keys.values", keys.values, (len(row_ids), codec.value_bytes), BYTES)
        self.checks.tensor("keys.scales", keys.scales, (len(row_ids),), SINGLE)
        paged.write_keys(pages, row_ids, keys, codec)

    def read_keys(self, pages: Tensor, row_ids: Tensor, codec: IndexCodec) -> Keys:
        """What `write_keys` wrote under these ids."""
        self.checks.check_row_ids(pages, row_ids, codec)
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
        self.checks.bytes_of("rows", rows, None, codec.row_bytes)
        if placed is not None:
            self.checks.bytes_of("placed", placed, None, codec.row_bytes, in_place=True)
        self.checks.tensor(
            "queries", queries, (None, None, codec.latent_dim + codec.rope_dim), QUERIES
        )
        count, heads, _ = queries.shape
        self.checks.tensor("slots", slots, (count, None), COUNTS)
        check_threads(threads)
        if into is not None:
            side("into", into, torch.Size((count, heads, codec.latent_dim)))
            self.checks.into(into)
        elif adds:
            raise BadInput("adds without the partial `into` that rows are added to")
        into = into or new_partial(queries, codec.latent_dim)
        slots = self.checks.ids("slots", slots, *slot_range(rows, placed))
        given = plain(queries), rows, slots, codec, scale, placed, into
        self.backend.attend(Attend(*given, threads, balanced, whole, spares, adds))
        return into

    def merge(self, first: Pair, second: Pair, *, into: Partial | None = None) -> Partial:
        """Two partials over disjoint parts of a selection make one: `ess.kernels.merge` says how.
        `into` may be one of them."""
        first, second = check_merge(first, second, into)
        for name, tensor in (("first", first.lse), ("second", second.lse)):
            self.checks.place(name, tensor)
        first, second = (
            Partial(out.contiguous(), lse.contiguous()) for out, lse in (first, second)
        )
        if into is not None:
            self.checks.into(into)
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
        asked = IndexQueries(queries, weights, pages, page_table, lengths, codec, threads, 1)
        call = self.checks.index_queries(asked)
        shape = queries.shape[0], call.width
        if out is None:
            out = empty(queries, *shape)
        else:
            self.checks.tensor("out", out, shape, SINGLE)
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
        named = queries, weights, pages, page_table, lengths, codec, threads
        call = self.checks.index_queries(IndexQueries(*named, queries_per_request))
        out = self.checks.selection(queries, k, out)
        self.backend.index_top_k(call, out)
        return out

    def index_scored(
        self,
        queries: Tensor,
        weights: Tensor,
        pages: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        codec: IndexCodec,
        *,
        k: int,
        threads: int = 1,
        queries_per_request: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """The selection of `index_top_k`, and the logits that it was made from, dense. Behind
        lengths[q] anything may stand, and lines may be longer than the pages."""
        named = queries, weights, pages, page_table, lengths, codec, threads
        call = self.checks.index_queries(IndexQueries(*named, queries_per_request))
        out = self.checks.selection(queries, k, None)
        return out, self.backend.index_scored(call, out)

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
        self.checks.tensor("logits", logits, (None, None), SINGLE)
        count, width = logits.shape
        self.checks.tensor("lengths", lengths, (count,), COUNTS)
        check_threads(threads)
        out = self.checks.selection(logits, k, out)
        lengths = self.checks.ids("lengths", lengths, 0, width + 1)
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
        self.checks.places(
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

    # ---- dense products

    def linear_fp8(
        self, values: Tensor, weights: Tensor, scales: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """Values [n, depth] times weights [width, depth] in e4m3: [n, width], float32 by itself.

        Weights have a float32 scale for each 128 x 128. Values are rounded to e4m3 first, each 128
        of a line under a scale of their own, amax / 448.
        """
        check_linear(values, weights, scales, out)
        self.checks.places(values=values, weights=weights, scales=scales, out=out)
        if out is None:
            out = empty(values, len(values), len(weights))
        self.backend.linear_fp8(Linear(adjacent(values), weights, scales, out))
        return out
