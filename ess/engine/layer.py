"""The stages of one layer in one decode step: what `overlap`'s schedules put in order.

This is where the model, the door and the kernels meet. It holds what one stage hands to a later
one and nothing that outlives the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ess.door import Offload, Resolution, Step
from ess.errors import BadState
from ess.kernels.backend import Ops
from ess.kernels.merge import Partial, merge
from ess.layout import ModelLayout
from ess.models.decoder import DecoderLayer
from ess.models.indexer import Probe
from ess.models.layers import Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What all layers of a step share."""

    offload: Offload
    step: Step
    ops: Ops
    rotation: Rotation
    page_table: Tensor
    lengths: Tensor
    scale: float
    located: dict[int, Tensor | None] = field(default_factory=dict)
    selected: dict[int, dict[range, Tensor]] = field(default_factory=dict)

    @property
    def layout(self) -> ModelLayout:
        return self.offload.layout


@dataclass(frozen=True, slots=True)
class Found:
    """A part of the batch and where its rows are."""

    part: range
    where: Resolution


class LayerStep:
    """`Stages` for a layer: made with the layer's input, asked by a schedule, then dropped."""

    def __init__(self, batch: Batch, layer: DecoderLayer, hidden: Tensor) -> None:
        self._batch = batch
        self._layer = layer
        self._group = batch.layout.group_of(layer.number)
        self._entry = layer.enter(hidden)
        self._probe: Probe | None = None
        self._queries: Tensor | None = None

    @property
    def number(self) -> int:
        return self._layer.number

    def parts(self, count: int) -> list[range]:
        counts = self._batch.step.query_counts
        if count == 1 or len(counts) == 1:
            return [range(sum(counts))]
        cut = sum(counts[: len(counts) // 2])
        return [range(cut), range(cut, sum(counts))]

    def index(self) -> None:
        """The new rows and keys go to their slots first: a token may select itself."""
        batch, layer = self._batch, self._layer
        values = layer.mla.rows(self._entry.row, batch.rotation)
        keys = None
        if layer.indexer is not None:
            self._probe = turned(layer.index(self._entry, batch.rotation), batch.layout, batch.ops)
            keys = key_records(self._probe.keys, batch.layout, batch.ops)
        rows = row_bytes(values, batch.layout, batch.ops)
        batch.offload.append(layer.number, rows, batch.step, keys=keys)

    def select(self, part: range) -> Tensor | None:
        """The part's selection; None when the group's first layer has made it already."""
        if self._probe is None:
            return None
        selected = self._batch.selected.setdefault(self._group, {})
        if part in selected:
            return selected[part]
        batch, span = self._batch, slice(part.start, part.stop)
        mine = Probe(self._probe.queries[span], self._probe.weights[span], self._probe.keys)
        chosen = select(batch, self._layer.number, mine, span)
        selected[part] = chosen
        return chosen

    def resolve(self, part: range) -> Found:
        batch = self._batch
        where = batch.offload.resolve(
            self._layer.number, self.select(part), batch.step, first_query=part.start
        )
        return Found(part, where)

    def locate(self) -> Tensor | None:
        """Every selected row's slot without a plan; None when one of them has no slot."""
        batch, number = self._batch, self._layer.number
        group = self._group
        [whole] = self.parts(1)
        selection = self.select(whole)
        if selection is not None:
            slots = batch.offload.locate(number, selection, batch.step)
            batch.located[group] = slots if ((slots >= 0) == (selection >= 0)).all() else None
        return batch.located[group]

    def wait(self, found: Found) -> None:
        found.where.wait()

    def pre_attn(self) -> None:
        self._queries = self._layer.mla.queries(self._entry.query, self._batch.rotation)

    def attend_all(self, found: Found) -> Partial:
        return self.attend_codes(found.part, found.where.slots)

    def attend_resident(self, found: Found) -> Partial:
        """Hits, and rows in place: both can be read before the fetch has landed."""
        codes = torch.where(found.where.place >= 0, -2 - found.where.place, -1)
        return self.attend_codes(found.part, torch.cat((found.where.hit, codes), dim=1))

    def attend_fetched(self, found: Found) -> Partial:
        return self.attend_codes(found.part, found.where.miss)

    def merge(self, resident: Partial, fetched: Partial) -> Partial:
        return merge(resident, fetched)

    def attend_truth(self) -> Tensor:
        """What this layer's attention is over the host's own rows: for verify mode."""
        batch, parts = self._batch, self._batch.selected[self._group]
        selection = torch.cat([parts[part] for part in sorted(parts, key=lambda p: p.start)])
        codes = batch.offload.host_codes(self.number, selection, batch.step)
        return self.attend_codes(range(len(codes)), codes).out

    def attend_codes(self, part: range, codes: Tensor) -> Partial:
        if self._queries is None:
            raise BadState("pre_attn comes before attention")
        return attend(self._batch, self._layer.number, self._queries[part.start : part.stop], codes)


def select(batch: Batch, layer: int, probe: Probe, queries: slice | list[int]) -> Tensor:
    """The selection of some of the step's queries: logits over the index pages, then top-k."""
    codec = batch.layout.index
    assert codec is not None, "an indexer without an index codec"
    return batch.ops.index_top_k(
        probe.queries.float().contiguous(),
        probe.weights.contiguous(),
        batch.offload.key_pages(layer),
        batch.page_table[queries],
        batch.lengths[queries],
        codec,
        k=batch.layout.top_k,
    )


def attend(batch: Batch, layer: int, queries: Tensor, codes: Tensor) -> Partial:
    """One pass over `codes`: a slot, -1 for padding, or -2 - host row for a row in place."""
    return batch.ops.attend(
        queries.contiguous(),
        batch.offload.slots(layer),
        codes.contiguous(),
        batch.layout.row,
        scale=batch.scale,
        placed=batch.offload.host(layer),
    )


def row_bytes(values: Tensor, layout: ModelLayout, ops: Ops) -> Tensor:
    out = torch.empty(len(values), layout.row_bytes, dtype=torch.uint8)
    return ops.encode_rows(values.float().contiguous(), layout.row, out)


def turned(probe: Probe, layout: ModelLayout, ops: Ops) -> Probe:
    """Keys that are quantised are rotated first, and so are the queries they will meet."""
    codec = layout.index
    if codec is None or codec.form == "f32" or not codec.hadamard:
        return probe
    return Probe(
        ops.hadamard(probe.queries.float()), probe.weights, ops.hadamard(probe.keys.float())
    )


def key_records(keys: Tensor, layout: ModelLayout, ops: Ops) -> Tensor:
    """One record per key: values, then the scale where the form has one."""
    codec = layout.index
    assert codec is not None, "keys without an index codec"
    encoded = ops.encode_keys(keys.float().contiguous(), codec)
    if not codec.scale_bytes:
        return encoded.values
    scales = encoded.scales.contiguous().view(torch.uint8).reshape(len(keys), -1)
    return torch.cat((encoded.values, scales), dim=1)
