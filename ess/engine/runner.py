"""The runner runs a model over an offload: decode batches and prompt chunks.

It owns the weights. Which schedule a layer runs is decided per step by `tuning`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from ess.door import Offload, Step
from ess.engine.layer import LayerStep
from ess.engine.rows import Batch, back, logits
from ess.engine.tuning import Tuning
from ess.engine.verify import Verifier
from ess.kernels.backend import Ops
from ess.kernels.merge import Partial
from ess.models.decoder import DecoderLayer
from ess.models.model import Model
from ess.overlap.da import da
from ess.overlap.dba import dba
from ess.overlap.none import none
from ess.overlap.policy import Mode, Vector
from ess.overlap.resident import resident
from ess.overlap.stages import Run, finish

Schedule = Callable[[Any], Run[Sequence[Partial]]]
SCHEDULES: Final[Mapping[Mode, Schedule]] = MappingProxyType(
    {Mode.RESIDENT: resident, Mode.NONE: none, Mode.DA: da, Mode.DBA: dba}
)


@dataclass(frozen=True, slots=True)
class Forward:
    """Of every query of a step: logits float32 and the finished hidden state."""

    logits: Tensor
    hidden: Tensor


class Runner:
    def __init__(
        self,
        model: Model,
        offload: Offload,
        ops: Ops,
        *,
        tuning: Tuning,
        verifier: Verifier,
    ) -> None:
        self.model = model
        self.offload = offload
        self.ops = ops
        self.verifier = verifier
        self.verified_layer: int | None = None
        self.tuning = tuning
        self._vector: Vector = ()

    def batch(self, step: Step) -> Batch:
        layer_total = self.offload.layout.layer_total
        self.verified_layer = self.verifier.layer_for(step.number, layer_total)
        self._vector = self.tuning.vector(step)
        line_of = torch.repeat_interleave(
            torch.arange(len(step.sequences)), torch.tensor(step.query_counts)
        )
        positions = torch.from_numpy(step.query_start + step.query_offset)
        return Batch(
            offload=self.offload,
            step=step,
            ops=self.ops,
            rotation=self.model.rotation(positions),
            page_table=self.offload.page_table(step.sequences)[line_of],
            lengths=positions + 1,
            scale=self.model.config.attention_scale,
        )

    def decode(self, batch: Batch, tokens: Sequence[int]) -> Forward:
        hidden = self.model.embed(torch.tensor(tokens))
        for layer in self.model.layers:
            hidden = self.layer(batch, layer, hidden)
        finished = self.model.finish(hidden)
        return Forward(logits(batch, self.model, finished), finished)

    def layer(self, batch: Batch, layer: DecoderLayer, hidden: Tensor) -> Tensor:
        mode = self._vector[layer.number]
        stages = LayerStep(batch, layer, hidden, self.tuning.timeline)
        partials = finish(SCHEDULES[mode](stages))
        attended = torch.cat([partial.out for partial in partials])
        self.tuning.ran(layer.number, stages.ran(mode))
        if self.verified_layer == layer.number:
            self.verifier.check(batch, stages, attended)
        return back(batch, layer, hidden, attended)
