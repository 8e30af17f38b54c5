"""What a chunk reads of its sequence: top-k over the index keys, attention over the host's rows."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ess.engine.layers.batch import compute_threads
from ess.engine.prompt.pack import Pack, Span

QUERIES: Final = 64


def top_k(pack: Pack, span: Span, layer: int, queries: Tensor, weights: Tensor) -> Tensor:
    codec, count = pack.layout.index, len(span.tokens)
    assert codec is not None, "an indexer without an index codec"
    assert len(queries) == count, f"{len(queries)} queries"
    return pack.ops.index_top_k(
        queries,
        weights,
        pack.runner.offload.memory(layer).key_pages,
        span.sequence.page_table.expand(count, -1),
        torch.arange(span.start, span.stop, dtype=torch.int32) + 1,
        codec,
        k=pack.layout.top_k,
        threads=compute_threads(),
    )


def attend_chosen(
    pack: Pack, layer: int, queries: Tensor, host_rows: Tensor, chosen: Tensor
) -> Tensor:
    """In place, from the host's rows; some queries at a time, for ops that gather them."""
    assert len(queries) == len(chosen), f"{len(chosen)} selections for {len(queries)} queries"
    offload, ops = pack.runner.offload, pack.ops
    named = torch.where(chosen >= 0, host_rows[chosen.clamp_min(0).long()], -1).int()
    parts = [
        ops.attend(
            q,
            offload.memory(layer).host,
            rows,
            offload.layout.row,
            scale=pack.runner.model.config.attention_scale,
            threads=compute_threads(),
        ).out
        for q, rows in zip(torch.split(queries, QUERIES), torch.split(named, QUERIES), strict=True)
    ]
    return torch.cat(parts)
