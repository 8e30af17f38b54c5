"""Between the model and the door: what a step's layers share, and the calls that both sides need.

Rows and keys become bytes here, queries become selections, codes become attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ess.door import Offload, Step
from ess.kernels.backend import Ops
from ess.kernels.merge import Partial
from ess.layout import ModelLayout
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


def select(batch: Batch, layer: int, probe: Probe, queries: slice | list[int]) -> Tensor:
    """The selection of some of the step's queries: logits over the index pages, then top-k."""
    codec = batch.layout.index
    assert codec is not None, "an indexer without an index codec"
    return batch.ops.index_top_k(
        probe.queries,
        probe.weights,
        batch.offload.key_pages(layer),
        batch.page_table[queries],
        batch.lengths[queries],
        codec,
        k=batch.layout.top_k,
        threads=torch.get_num_threads(),
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
        threads=torch.get_num_threads(),
    )


def row_bytes(values: Tensor, layout: ModelLayout, ops: Ops) -> Tensor:
    out = torch.empty(len(values), layout.row_bytes, dtype=torch.uint8)
    return ops.encode_rows(values.float().contiguous(), layout.row, out)


def turned(probe: Probe, layout: ModelLayout, ops: Ops) -> Probe:
    """Keys that are quantised are rotated first, and so are the queries they will meet."""
    codec = layout.index
    if codec is None or codec.form == "f32" or not codec.hadamard:
        return probe
    queries = ops.hadamard(probe.queries.float()).bfloat16()
    return Probe(queries, probe.weights, ops.hadamard(probe.keys.float()))


def key_records(keys: Tensor, layout: ModelLayout, ops: Ops) -> Tensor:
    """One record per key: values, then the scale where the form has one."""
    codec = layout.index
    assert codec is not None, "keys without an index codec"
    encoded = ops.encode_keys(keys.float().contiguous(), codec)
    if not codec.scale_bytes:
        return encoded.values
    scales = encoded.scales.contiguous().view(torch.uint8).reshape(len(keys), -1)
    return torch.cat((encoded.values, scales), dim=1)
