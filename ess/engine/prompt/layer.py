"""One layer of the model over a pack: rows and keys are stored, then the pack's queries attend.

No span reads what another one of its pack writes: the indexer and the attention run span by span.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ess.engine.layers.batch import back, front, key_records, queries, row_bytes, turned
from ess.engine.prompt.pack import Chosen, Pack, window_of
from ess.engine.prompt.reading import attend_all, attend_chosen, top_k
from ess.models.decoder import DecoderLayer, Entry


def run_layer(
    pack: Pack, layer: DecoderLayer, hidden: Tensor, given: Chosen
) -> tuple[Tensor, Chosen]:
    entry = layer.enter(hidden)
    chosen = given
    if layer.indexer is not None:
        chosen = _select(pack, layer, entry)
        _keep_windows(pack, layer, chosen)
    attended = _attend(pack, layer, entry, chosen)
    return layer.mlp(layer.output(hidden, attended)), chosen


def run_layer_alike(
    pack: Pack, layer: DecoderLayer, hidden: Tensor, given: Chosen
) -> tuple[Tensor, Chosen]:
    made, chosen = front(pack, layer, hidden), given
    if made.queries is not None and made.weights is not None:
        _import_keys(pack, layer, made.keys)
        chosen = [
            top_k(pack, span, layer.number, made.queries[place], made.weights[place])
            for _, span, place in pack.each()
        ]
        _keep_windows(pack, layer, chosen)
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


def _keep_windows(pack: Pack, layer: DecoderLayer, chosen: Chosen) -> None:
    group = pack.layout.group_of(layer.number)
    for at, span, _ in pack.each():
        span.windows[group] = window_of(span, chosen[at], pack.layout.top_k)


def _select(pack: Pack, layer: DecoderLayer, entry: Entry) -> Chosen:
    layout, ops = pack.layout, pack.ops
    probe = turned(layer.index(entry, pack.rotation), layout, ops)
    _import_keys(pack, layer, key_records(probe.keys, layout, ops))
    return [
        None
        if span.stop <= layout.top_k
        else top_k(pack, span, layer.number, probe.queries[place], probe.weights[place])
        for _, span, place in pack.each()
    ]


def _attend(pack: Pack, layer: DecoderLayer, entry: Entry, chosen: Chosen) -> Tensor:
    new = row_bytes(layer.mla.rows(entry.row, pack.rotation), pack.layout, pack.ops)
    _import_rows(pack, layer, new)
    asked = layer.mla.queries(entry.query, pack.rotation)
    attended = []
    for at, span, place in pack.each():
        host_rows, mine = span.sequence.host_rows(0, span.stop), chosen[at]
        if mine is None:
            attended.append(attend_all(pack, span, layer.number, asked[place], host_rows))
        else:
            attended.append(attend_chosen(pack, layer.number, asked[place], host_rows, mine))
    return torch.cat(attended)
