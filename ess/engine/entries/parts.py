"""Attention of these models as the kernels do it: parts of what a query sees, then its sink."""

from __future__ import annotations

import torch
from torch import Tensor

from ess.kernels.merge import Partial
from ess.kernels.ops import Ops
from ess.kernels.reference.keys import key_records
from ess.layout import IndexCodec, RowCodec


def plain_rows(dim: int) -> RowCodec:
    """How windows, and entries that all tokens attend to, are kept."""
    return RowCodec(form="f32", latent_dim=dim, rope_dim=0)


def with_sink(partial: Partial, sinks: Tensor) -> Tensor:
    """A sink takes its share of the weights and gives nothing: what is attended, [tokens, heads,
    dim]."""
    share = (partial.lse - torch.logaddexp(partial.lse, sinks)).exp()
    return partial.out * share[..., None]


def coded_rows(ops: Ops, values: Tensor, codec: RowCodec) -> Tensor:
    rows = torch.empty((len(values), codec.row_bytes), dtype=torch.uint8)
    return ops.encode_rows(values, codec, rows) if len(values) else rows


def coded_keys(ops: Ops, values: Tensor, codec: IndexCodec) -> Tensor:
    if not len(values):
        return torch.empty((0, codec.key_bytes), dtype=torch.uint8)
    return key_records(ops.encode_keys(values, codec), codec)


def asked_queries(queries: Tensor, codec: IndexCodec) -> Tensor:
    """Index queries, rotated and mixed as the keys are."""
    return queries.bfloat16() if codec.form == "fp8" else queries
