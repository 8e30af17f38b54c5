"""A step of a rank without tokens: it joins every exchange and sends no tokens.

It calls the same schedules in the same order as a rank with tokens (`step.runner`, `step.drafts`,
`prompt.run`), over no tokens, so its exchanges are theirs. Attention, pools and logits have nothing
to do, and are left out. On a device what is queued for a decode step depends on nothing but what
the ranks have agreed on, so it may be a graph (`graphs.replays`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ess.comm.experts.expert_ranks import Part
from ess.engine.layers.experts import ExpertStep
from ess.engine.ranks.agreement import StepAgreement
from ess.models.decoder import DecoderLayer
from ess.models.model import Model
from ess.overlap import sbo, tbo
from ess.overlap.sbo import Sbo
from ess.overlap.stages import Run, finish
from ess.overlap.timeline import Timeline

Runs = Sequence[tuple[bool, Sequence[DecoderLayer]]]


class Standby:
    """For a model and its runs of layers, as `layer_runs` cuts them."""

    def __init__(self, model: Model, runs: Runs, order: Sbo, timeline: Timeline) -> None:
        self._model = model
        self._runs = runs
        self._order = order
        self._timeline = timeline

    def through(self, layers: Sequence[DecoderLayer]) -> Run[Tensor]:
        """An empty half, stage by stage beside the other: attention has one yield in every mode."""
        none = self._none
        for layer in layers:
            yield
            yield from self._layer(layer, none, "half")
            yield
        return none

    def decode(self, agreement: StepAgreement) -> None:
        """The layers over a decode batch, and the MTP module's where ranks draft."""
        for can_split, layers in self._runs:
            if agreement.splits and can_split:
                tbo.interleave(self.through(layers), self.through(layers))
            else:
                finish(self._whole(layers))
        if agreement.draft_count:
            self._drafts(agreement.draft_count)

    def _drafts(self, count: int) -> None:
        """The MTP module's layer over the step's tokens, and further guesses."""
        finish(self._layer(self._mtp, self._none_of_mtp, "batch"))
        for _ in range(count - 1):
            self._mlp(self._mtp, self._none_of_mtp, "batch")

    def prompts(self, *, has_mtp: bool) -> None:
        for layer in self._model.layers:
            self._mlp(layer, self._none, "chunk")
        if has_mtp:
            self._mlp(self._mtp, self._none_of_mtp, "chunk")

    def _whole(self, layers: Sequence[DecoderLayer]) -> Run[None]:
        for layer in layers:
            yield from self._layer(layer, self._none, "batch")

    def _layer(self, layer: DecoderLayer, none: Tensor, part: Part) -> Run[None]:
        if layer.experts is not None:
            experts = ExpertStep(layer, none, self._timeline, 0, part=part)
            yield from sbo.schedule(experts, self._order)

    def _mlp(self, layer: DecoderLayer, none: Tensor, part: Part) -> None:
        if layer.experts is not None:
            layer.mlp(none, part)

    @property
    def _none(self) -> Tensor:
        return self._model.embed(torch.empty(0, dtype=torch.int64, device=self._model.device))

    @property
    def _mtp(self) -> DecoderLayer:
        assert self._model.mtp is not None, "drafts need an MTP module"
        return self._model.mtp.layer

    @property
    def _none_of_mtp(self) -> Tensor:
        return torch.empty((0, self._model.config.hidden_dim), device=self._model.device)
