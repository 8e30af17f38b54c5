"""What a configuration says of units that are selected together, and of linear attention."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, field

from ess.units import PAGE_ROWS

Size = Annotated[int, Meta(ge=1, le=1 << 24)]


class Pooled(msgspec.Struct, frozen=True, kw_only=True):
    """Indexers that choose neighbouring tokens together, by one key that is mixed of theirs; and
    residual streams that are mixed around each block."""

    unit: Annotated[int, Meta(ge=1, le=PAGE_ROWS)] = field(name="index_kpool")
    mixing_rounds: Size = field(name="hc_sinkhorn_iters")


class Recurrent(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of linear attention: a state of one size in the place of rows."""

    head_count: Size = field(name="linear_num_heads")
    head_dim: Size = field(name="linear_head_dim")
    kernel: Annotated[int, Meta(ge=1, le=64)] = field(name="linear_conv_kernel_dim")
    """Tokens that a channel of queries, keys and values is made of."""
    decay_bound: Annotated[float, Meta(ge=-1e3, lt=0.0)] | None = field(name="linear_lower_bound")
    """Of the logarithm of what a state keeps a token; None: none."""

    @property
    def state_bytes(self) -> int:
        """Of a request in one layer: a matrix of each head in float32, and in bf16 the channels
        of the tokens before."""
        wide = self.head_count * self.head_dim
        return 4 * wide * self.head_dim + 2 * 3 * wide * (self.kernel - 1)
