"""From a layer's input to what attention and the pools need: queries, new rows and index keys.

Where stages are compiled, rows and keys come out of them as bytes. Elsewhere an op norms, rotates
and encodes what a projection gives, and stores it in its place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ess.engine.layers.batch import Batch, Shared, compute_threads
from ess.engine.layers.units import put_keys
from ess.layout import RowCodec
from ess.models.decoder import DecoderLayer, Front
from ess.models.guest.grouped import Grouped
from ess.models.layers import Rotation
from ess.models.mla import Mla


class Asking(NamedTuple):
    """The normed low-rank query, and of a full layer the index queries and their weights."""

    query: Tensor
    queries: Tensor | None = None
    weights: Tensor | None = None


class NewRowPlaces(NamedTuple):
    """Where new rows and index keys go; without `places` and `row_ids` each goes behind the one
    before."""

    rows: Tensor
    keys: Tensor | None
    places: Tensor | None = None
    row_ids: Tensor | None = None


def stored(batch: Batch, layer: DecoderLayer, hidden: Tensor, queries: range) -> Asking:
    """The step has the new rows and keys of these queries: a token may select itself."""
    step, number = batch.step, layer.number
    if batch.ops.has_stages():
        fresh = front(batch, layer, hidden)
        step.append(number, fresh.rows, keys=fresh.keys, queries=queries)
        return Asking(fresh.query, fresh.queries, fresh.weights)
    memory, places = batch.offload.memory(number), step.places(number, queries=queries)
    room = NewRowPlaces(memory.slots, memory.key_pages, places, batch.places.row_ids)
    asking = _finished(batch, layer, hidden, room)
    step.wrote(number, keys=layer.has_keys, queries=queries)
    return asking


def front(batch: Shared, layer: DecoderLayer, hidden: Tensor) -> Front:
    """New rows and keys as bytes, one after the other."""
    layout = batch.layout
    if batch.ops.has_stages():
        compiled = layer.compiled(layout)
        return compiled.front(hidden, batch.rotation, threads=compute_threads())
    room = NewRowPlaces(_bytes(hidden, layout.row_of(layer.number).row_bytes), None)
    if layer.has_keys:
        assert layout.index is not None, "an indexer without an index codec"
        room = room._replace(keys=_bytes(hidden, layout.index.key_bytes))
    query, queries, weights = _finished(batch, layer, hidden, room)
    return Front(query, room.rows, queries, weights, room.keys)


def turned(batch: Shared, queries: Tensor, rotation: Rotation) -> Tensor:
    """Index queries, rotated and mixed as the keys are."""
    codec = batch.layout.index
    assert codec is not None, "an indexer without an index codec"
    return batch.ops.turn_queries(queries, rotation.angles, codec)


def _finished(batch: Shared, layer: DecoderLayer, hidden: Tensor, room: NewRowPlaces) -> Asking:
    layout, ops, rotation = batch.layout, batch.ops, layer.turning(batch.rotation)
    entry = layer.enter(hidden)
    codec = layout.row_of(layer.number)
    _finish_rows(batch, layer.mla, entry.row, rotation, room, codec)
    if layer.indexer is None:
        return Asking(entry.query)
    assert layout.index is not None, "an indexer without an index codec"
    assert room.keys is not None, f"layer {layer.number} has keys"
    key_finish = layer.indexer.key_finish(rotation)
    if key_finish is None:
        probe = layer.indexer.probe(entry.hidden, entry.query, rotation)
        put_keys(batch.unit_keys(layer, probe.keys), layout.index, room.keys, room.row_ids)
        return Asking(entry.query, probe.queries, probe.weights)
    raw = layer.indexer.raw(entry.hidden, entry.query, rotation)
    ops.finish_keys(raw.keys, key_finish, layout.index, room.keys, room.row_ids)
    return Asking(entry.query, turned(batch, raw.queries, rotation), raw.weights)


def _finish_rows(
    batch: Shared,
    mla: Mla | Grouped,
    row: Tensor,
    rotation: Rotation,
    room: NewRowPlaces,
    codec: RowCodec,
) -> None:
    ops, finish = batch.ops, mla.row_finish(rotation)
    if finish is not None:
        ops.finish_rows(row, finish, codec, room.rows, room.places)
    elif room.places is None:
        ops.encode_rows(mla.rows(row, rotation), codec, room.rows)
    else:
        ops.store_rows(mla.rows(row, rotation), codec, room.rows, room.places)


def _bytes(hidden: Tensor, width: int) -> Tensor:
    return torch.empty((len(hidden), width), dtype=torch.uint8, device=hidden.device)
