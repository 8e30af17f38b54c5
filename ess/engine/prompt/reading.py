"""A chunk's reads of its sequence: top-k over the index keys, attention over the rows."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ess.engine.layers import units
from ess.engine.layers.batch import compute_threads
from ess.engine.prompt.pack import Pack, Span
from ess.engine.step_bytes import SCORED
from ess.kernels.merge import Partial
from ess.kernels.ops import Ops
from ess.layout import RowCodec
from ess.units import div_ceil

QUERIES: Final = 64


def top_k(pack: Pack, at: int, span: Span, layer: int, queries: Tensor, weights: Tensor) -> Tensor:
    """Some queries at a time, since each is scored over the whole context."""
    codec, count = pack.layout.index, len(span.tokens)
    assert codec is not None, "an indexer without an index codec"
    assert len(queries) == count, f"{len(queries)} queries"
    if pack.layout.select_unit > 1:
        pages, table = pack.runner.offload.memory(layer).key_pages, pack.tables[at]
        lengths = torch.arange(span.start, span.stop, device=pack.device) + 1
        return units.select_in_line(pack.layout, queries, weights, pages, table, lengths)[0]
    lengths = torch.arange(span.start, span.stop, dtype=torch.int32, device=pack.device) + 1
    pages = pack.runner.offload.memory(layer).key_pages
    step = div_ceil(count, div_ceil(count, SCORED))
    parts = [
        pack.ops.index_top_k(
            block,
            weights[first : first + step],
            pages,
            pack.tables[at].expand(len(block), -1),
            lengths[first : first + step],
            codec,
            k=pack.layout.top_k,
            threads=compute_threads(),
        )
        for first, block in zip(range(0, count, step), torch.split(queries, step), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_chosen(
    pack: Pack, layer: int, at: int, queries: Tensor, chosen: Tensor, into: Partial
) -> None:
    """Span number `at`."""
    assert len(queries) == len(chosen), f"{len(chosen)} selections for {len(queries)} queries"
    codec, (rows, codes) = pack.layout.row_of(layer), pack.rows.reading(layer, at, chosen)
    scale = pack.runner.model.config.attention_scale
    attend(pack.ops, queries, rows, codes, codec, scale=scale, into=into)


def attend(
    ops: Ops,
    queries: Tensor,
    rows: Tensor,
    slots: Tensor,
    codec: RowCodec,
    *,
    scale: float,
    into: Partial | None = None,
) -> Partial:
    """Some queries at a time, for ops that gather their rows."""
    if into is None:
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
