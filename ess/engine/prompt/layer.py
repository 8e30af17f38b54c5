"""One layer of the model over a pack: rows and keys are stored, then the pack's queries attend.

No span reads what another one of its pack writes: the indexer and the attention run span by span.

The stages are those of a decode step, compiled where they can be: they treat every token alike,
however the prompt is cut, whatever prefix was there and whatever else is in the pack.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ess.engine.layers.batch import back, front, queries
from ess.engine.prompt.pack import Chosen, Pack, window_of
from ess.engine.prompt.reading import attend_chosen, top_k
from ess.models.decoder import DecoderLayer


def run_layer(
    pack: Pack, layer: DecoderLayer, hidden: Tensor, given: Chosen
) -> tuple[Tensor, Chosen]:
    made, chosen = front(pack, layer, hidden), given
    if made.queries is not None and made.weights is not None:
        _import_keys(pack, layer, made.keys)
        picked = [
            top_k(pack, span, layer.number, made.queries[place], made.weights[place])
            for _, span, place in pack.each()
        ]
        _keep_windows(pack, layer, picked)
        chosen = picked
    _import_rows(pack, layer, made.rows)
    asked = queries(pack, layer, made.query)
    attended = []
    for at, span, place in pack.each():
        mine = chosen[at]
        assert mine is not None, f"layer {layer.number} shares a selection that was not made"
        host_rows = span.sequence.host_rows(0, span.stop)
        attended.append(attend_chosen(pack, layer.number, asked[place], host_rows, mine))
    return back(pack, layer, hidden, torch.cat(attended)), chosen


def _import_keys(pack: Pack, layer: DecoderLayer, keys: Tensor | None) -> None:
    assert keys is not None, f"layer {layer.number} has an indexer and made no keys"
    for _, span, place in pack.each():
        span.sequence.import_keys(layer.number, span.start, keys[place])


def _import_rows(pack: Pack, layer: DecoderLayer, rows: Tensor) -> None:
    for _, span, place in pack.each():
        span.sequence.import_rows(layer.number, span.start, rows[place])


def _keep_windows(pack: Pack, layer: DecoderLayer, chosen: Sequence[Tensor]) -> None:
    group = pack.layout.group_of(layer.number)
    for at, span, _ in pack.each():
        span.windows[group] = window_of(span, chosen[at])
