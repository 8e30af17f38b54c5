"""Attention over rows where they lie: slots of the slab, or rows of the host in place.

A code is what `Resolution.slots` holds: a slot, -1 for padding, or -2 - host row. Each query is
computed on its own, over its rows in the order given, so its bits depend neither on the rest of
the batch nor on which slots its rows are in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ess.kernels.backend import Ops
from ess.kernels.merge import Partial
from ess.layout import RowCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Where one layer's rows are: the slab as this layer sees it and its rows on the host."""

    slab: Tensor
    host: Tensor
    codec: RowCodec

    def gather(self, codes: Tensor, ops: Ops) -> Tensor:
        """float32 [n, latent + rope] of codes [n], none of them padding."""
        in_slab = codes >= 0
        rows = torch.empty(len(codes), self.codec.row_bytes, dtype=torch.uint8)
        rows[in_slab] = self.slab[codes[in_slab].long()]
        rows[~in_slab] = self.host[(-2 - codes[~in_slab]).long()]
        out = torch.empty(len(codes), self.codec.latent_dim + self.codec.rope_dim)
        return ops.decode_rows(rows, self.codec, out)


def attend(queries: Tensor, codes: Tensor, rows: Rows, *, scale: float, ops: Ops) -> Partial:
    """Queries [q, heads, latent + rope] over codes [q, k]; a partial over nothing is (0, -inf)."""
    count, heads = queries.shape[:2]
    out = torch.zeros(count, heads, rows.codec.latent_dim)
    lse = torch.full((count, heads), -math.inf)
    for query in range(count):
        mine = codes[query][codes[query] != -1]
        if len(mine):
            keys = rows.gather(mine, ops)
            scores = queries[query].float() @ keys.T * scale
            lse[query] = scores.logsumexp(-1)
            weights = (scores - lse[query][:, None]).exp()
            out[query] = weights @ keys[:, : rows.codec.latent_dim]
    return Partial(out, lse)
