"""The runner runs a model over an offload: decode batches and prompt chunks.

It owns the weights. Which schedule a layer runs is given by the caller, per layer.
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
from ess.engine.verify import Verifier
from ess.errors import BadInput
from ess.kernels.backend import Ops
from ess.kernels.merge import Partial
from ess.models.decoder import DecoderLayer
from ess.models.model import Model
from ess.overlap.da import da
from ess.overlap.dba import dba
from ess.overlap.none import none


def resident(stages: LayerStep) -> Sequence[Partial]:
    """No plan, no fetch, no merge: for a step whose rows are all in slots; else as NONE.

    compute  | index | locate | pre_attn | attend_all |
    """
    stages.index()
    slots = stages.locate()
    if slots is None:
        [whole] = stages.parts(1)
        found = stages.resolve(whole)
        stages.wait(found)
        slots = found.where.slots
    stages.pre_attn()
    return [stages.attend_codes(range(len(slots)), slots)]


Schedule = Callable[[Any], Sequence[Partial]]
SCHEDULES: Final[Mapping[str, Schedule]] = MappingProxyType(
    {"resident": resident, "none": none, "da": da, "dba": dba}
)


def schedules_for(modes: str | Sequence[str], layer_count: int) -> tuple[Schedule, ...]:
    """One mode for all layers, or one per layer."""
    names = [modes] * layer_count if isinstance(modes, str) else list(modes)
    if len(names) != layer_count:
        raise BadInput(f"{len(names)} modes for {layer_count} layers")
    for name in names:
        if name not in SCHEDULES:
            raise BadInput(f"mode {name!r} is not one of {', '.join(SCHEDULES)}")
    return tuple(SCHEDULES[name] for name in names)


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
        modes: str | Sequence[str],
        verifier: Verifier,
    ) -> None:
        self.model = model
        self.offload = offload
        self.ops = ops
        self.verifier = verifier
        self.verified_layer: int | None = None
        self._schedules = schedules_for(modes, offload.layout.layer_total)

    def batch(self, step: Step) -> Batch:
        layer_total = self.offload.layout.layer_total
        self.verified_layer = self.verifier.layer_for(step.number, layer_total)
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
        stages = LayerStep(batch, layer, hidden)
        partials = self._schedules[layer.number](stages)
        attended = torch.cat([partial.out for partial in partials])
        if self.verified_layer == layer.number:
            self.verifier.check(batch, stages, attended)
        return back(batch, layer, hidden, attended)
