"""What a backend is asked to do: one record for each op with many arguments, and the protocol.

`ess.kernels.ops` makes the records. By then shapes, types and devices have been checked, room for
the result has been made, and every tensor is in the form that is written here, so that a backend
reads and computes and asks nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from ess.kernels.merge import Partial, like
from ess.layout import IndexCodec, RowCodec
from ess.units import PAGE_ROWS

Merge = Callable[[Partial, Partial, Partial], None]


class Keys(NamedTuple):
    """Encoded index keys: bytes of values [n, value_bytes], float32 scales [n], 1 where plain."""

    values: Tensor
    scales: Tensor


class Angles(NamedTuple):
    """cos and sin by which pairs are rotated: float32 [n, dim / 2], dense."""

    cos: Tensor
    sin: Tensor

    @property
    def dim(self) -> int:
        return 2 * self.cos.shape[1]


class RowFinish(NamedTuple):
    """What a new row still needs: its latents' root mean square norm, its rope part's angles."""

    weight: Tensor
    eps: float
    angles: Angles


class KeyFinish(NamedTuple):
    """What a new index key still needs: its norm to mean 0 and variance 1, and its angles."""

    weight: Tensor
    bias: Tensor
    eps: float
    angles: Angles


class Linear(NamedTuple):
    """Values [n, depth] and `out` [n, width] dense in the last axis, the rest dense: weights
    [width, depth] in e4m3 and a float32 scale for each 128 x 128 of them."""

    values: Tensor
    weights: Tensor
    scales: Tensor
    out: Tensor


class Attend(NamedTuple):
    """Queries [q, heads, dim] in float32, bfloat16 or e4m3 and slots [q, width] in int32, dense in
    the last axis; bytes of a row side by side; `into` dense."""

    queries: Tensor
    rows: Tensor
    slots: Tensor
    codec: RowCodec
    scale: float
    placed: Tensor | None
    into: Partial
    threads: int
    balanced: bool
    whole: bool
    spares: bool
    adds: bool

    def in_two(self, attend: Callable[[Attend], None], merge: Merge) -> None:
        """Computes `adds` for a backend that cannot continue from a partial."""
        own = like(self.into)
        attend(self._replace(into=own, adds=False))
        merge(self.into, own, self.into)


def slot_range(rows: Tensor, placed: Tensor | None) -> tuple[int, int]:
    """The lowest slot, and the first beyond the highest."""
    return -1 if placed is None else -1 - placed.shape[0], rows.shape[0]


class IndexQueries(NamedTuple):
    """Queries as those of `Attend`; float32 weights [q, heads] dense; the page table and the
    lengths in int32, dense in the last axis; bytes of a page side by side. Those of a request lie
    beside each other and may share a read of its keys."""

    queries: Tensor
    weights: Tensor
    pages: Tensor
    page_table: Tensor
    lengths: Tensor
    codec: IndexCodec
    threads: int
    queries_per_request: int

    @property
    def width(self) -> int:
        """The positions that a row of the page table has room for."""
        return self.page_table.shape[1] * PAGE_ROWS


class Cuts(NamedTuple):
    """The limits for each line of scores. A missing top-k is the vocabulary or more, a missing
    top-p inf, a missing min-p 0. top-k in int64, the others in float32. A line with a top-k of 0 is
    of a greedy request, and its scores that are left have no meaning."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


class Draws(NamedTuple):
    """A line's seed, and the position of the token that is drawn; lines with a top-k of 0 are not
    drawn. All int64 and dense."""

    top_k: Tensor
    seeds: Tensor
    positions: Tensor


class Products(NamedTuple):
    """Tokens and `out` dense in the last axis; begin, ends, weights and scales dense."""

    tokens: Tensor
    begin: Tensor | None
    ends: Tensor
    weights: Tensor
    scales: Tensor | None
    out: Tensor


class Backend(Protocol):
    """A module of functions that trust their arguments. The contracts are those of `Ops`."""

    def implementation(self) -> str: ...
    def has_stages(self) -> bool: ...
    def reaches(self, tensor: Tensor, *, in_place: bool) -> bool:
        """Whether kernels can read the tensor; `in_place`: from memory behind a link will do."""

    def checked_before(self, name: str, ids: Tensor) -> bool:
        """Whether `Ops` checks ids of this name before the call. False where the kernel checks
        them as it reads them and raises BadInput before it writes anything; false too on a device,
        where looking would wait for it: there they are trusted."""

    def encode_rows(self, values: Tensor, codec: RowCodec, out: Tensor) -> None: ...
    def decode_rows(self, rows: Tensor, codec: RowCodec, out: Tensor) -> None: ...
    def encode_keys(self, values: Tensor, codec: IndexCodec) -> Keys: ...
    def store_rows(self, values: Tensor, codec: RowCodec, out: Tensor, places: Tensor) -> None: ...
    def hadamard(self, values: Tensor) -> Tensor: ...
    def finish_rows(
        self,
        values: Tensor,
        finish: RowFinish,
        codec: RowCodec,
        out: Tensor,
        places: Tensor | None,
    ) -> None: ...
    def finish_keys(
        self,
        values: Tensor,
        finish: KeyFinish,
        codec: IndexCodec,
        out: Tensor,
        row_ids: Tensor | None,
    ) -> None: ...
    def turn_queries(self, queries: Tensor, angles: Angles, codec: IndexCodec) -> Tensor: ...
    def attend(self, call: Attend) -> None: ...
    def merge(self, first: Partial, second: Partial, into: Partial) -> None: ...
    def index_logits(self, call: IndexQueries, out: Tensor) -> None: ...
    def index_top_k(self, call: IndexQueries, out: Tensor) -> None: ...
    def index_scored(self, call: IndexQueries, out: Tensor) -> Tensor:
        """`index_top_k`, which returns its logits."""

    def top_k(self, logits: Tensor, lengths: Tensor, out: Tensor, threads: int) -> None: ...
    def cut(self, scores: Tensor, cuts: Cuts, out: Tensor) -> None:
        """`ess.kernels.cut` has the contract."""

    def draw(self, scores: Tensor, draws: Draws, tokens: Tensor) -> None:
        """`ess.kernels.cut` has the contract."""

    def expert_products(self, call: Products) -> None: ...

    # `ess.kernels.received` has the contracts.
    def take_received(self, tokens: Tensor, lines: Tensor, ends: Tensor, out: Tensor) -> None: ...
    def gate_received(self, both: Tensor, ends: Tensor, limit: float, out: Tensor) -> None: ...
    def add_received(self, made: Tensor, places: Tensor, weights: Tensor, out: Tensor) -> None: ...
    def linear_fp8(self, call: Linear) -> None: ...
    def counts_to_build(self, weights: Tensor, count_max: int) -> list[int]:
        """Numbers of tokens, up to `count_max`, whose products with these weights in e4m3 should be
        made before there are requests, since a library compiles programs for them; of our own
        kernels none."""
