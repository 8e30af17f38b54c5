"""Attention of these models as the kernels do it: parts of what a query sees, then its sink."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ess.engine.layers.batch import compute_threads
from ess.kernels.merge import Partial
from ess.kernels.ops import Ops
from ess.layout import IndexCodec, RowCodec

QUERIES: Final = 64


def plain_rows(dim: int) -> RowCodec:
    """How windows, and entries that all tokens attend to, are kept."""
    return RowCodec(form="f32", latent_dim=dim, rope_dim=0)


def attend(
    ops: Ops, queries: Tensor, rows: Tensor, slots: Tensor, codec: RowCodec, *, scale: float
) -> Partial:
    """Some queries at a time, for ops that gather their rows."""
    shape = tuple(queries.shape[:2])
    into = Partial(queries.new_empty(*shape, codec.latent_dim), queries.new_empty(shape))
    for first in range(0, len(queries), QUERIES):
        block = slice(first, first + QUERIES)
        ops.attend(
            queries[block].contiguous(),
            rows,
            slots[block].contiguous(),
            codec,
            scale=scale,
            into=Partial(into.out[block], into.lse[block]),
            threads=compute_threads(),
        )
    return into


def with_sink(partial: Partial, sinks: Tensor) -> Tensor:
    """A sink takes its share of the weights and gives nothing: what is attended, [tokens, heads,
    dim]."""
    share = (partial.lse - torch.logaddexp(partial.lse, sinks)).exp()
    return partial.out * share[..., None]


def coded_rows(ops: Ops, values: Tensor, codec: RowCodec) -> Tensor:
    rows = torch.empty((len(values), codec.row_bytes), dtype=torch.uint8)
    return ops.encode_rows(values, codec, rows) if len(values) else rows


def coded_keys(ops: Ops, values: Tensor, codec: IndexCodec) -> Tensor:
    """Keys as records: a key's bytes, then its scale."""
    if not len(values):
        return torch.empty((0, codec.key_bytes), dtype=torch.uint8)
    keys = ops.encode_keys(values, codec)
    if not codec.scale_bytes:
        return keys.values
    return torch.cat((keys.values, keys.scales[:, None].contiguous().view(torch.uint8)), 1)


def asked_queries(queries: Tensor, codec: IndexCodec) -> Tensor:
    """Index queries, rotated and mixed as the keys are."""
    return queries.bfloat16() if codec.form == "fp8" else queries
