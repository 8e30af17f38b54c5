"""Selections of units: neighbouring rows that are chosen together, by a key mixed from theirs.

The pools keep a key of each unit, which the last of its tokens brings. The sums over the tokens of
an open unit lie beside the rows (`Carried.unit_keys`). Plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ess.kernels.reference.keys import encode_keys, key_records, page_values, write_keys
from ess.layout import IndexCodec, ModelLayout
from ess.models.indexer import index_scores, rows_of_units, top_k
from ess.units import PAGE_ROWS, div_ceil


def put_keys(values: Tensor, codec: IndexCodec, room: Tensor, row_ids: Tensor | None) -> None:
    """Writes keys into pages, or without row ids into records, one after the other."""
    keys = encode_keys(values, codec)
    if row_ids is not None:
        return write_keys(room, row_ids, keys, codec)
    room.copy_(key_records(keys, codec))


def select(
    layout: ModelLayout,
    queries: Tensor,
    weights: Tensor,
    pages: Tensor,
    table: Tensor,
    lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    """The selections of queries that each have a line of the page table, and a score for every
    position: the score of its unit. Rows behind the last whole unit are always chosen and get the
    best score."""
    selected = [
        select_in_line(
            layout, queries[n : n + 1], weights[n : n + 1], pages, table[n], lengths[n : n + 1]
        )
        for n in range(len(queries))
    ]
    chosen, scores = zip(*selected, strict=True)
    width = table.shape[1] * PAGE_ROWS
    filled = [torch.nn.functional.pad(each, (0, width - each.shape[1])) for each in scores]
    return torch.cat(chosen), torch.cat(filled)


def select_in_line(
    layout: ModelLayout,
    queries: Tensor,
    weights: Tensor,
    pages: Tensor,
    line: Tensor,
    lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    """`select` of queries that share one line of the page table."""
    assert layout.index is not None, "an indexer without an index codec"
    unit, whole = layout.select_unit, lengths // layout.select_unit
    if lengths.is_cpu:
        line = line[: div_ceil(int(lengths.max()), PAGE_ROWS)]
    keys = page_values(pages[line.long().clamp_min(0)], layout.index)
    scores = index_scores(queries, weights, keys)
    chosen = rows_of_units(top_k(scores, whole, layout.units_max), lengths, layout.top_k, unit)
    seen = torch.arange(len(keys), device=scores.device) < whole[:, None]
    best = scores.where(seen, 0.0).amax(1, keepdim=True)
    return chosen, scores.where(seen, best).repeat_interleave(unit, 1).contiguous()
