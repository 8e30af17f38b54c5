"""How a step goes through a model that attends to entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ess.door import Offload
from ess.engine.config import EngineConfig
from ess.engine.entries.guesses import draft
from ess.engine.entries.memory import Memory, Tokens
from ess.engine.entries.prompt import run_spans
from ess.engine.entries.refusals import check_settings, lacks
from ess.engine.entries.step import EntryBatch
from ess.engine.layers.batch import Batch, ended
from ess.engine.layers.heads import AllHeads
from ess.engine.prompt.pack import Span, packed
from ess.engine.prompt.run import Prefilled
from ess.engine.step.feeding import StepInput, StepOutput
from ess.engine.step.runner import Runner
from ess.engine.step.stateful import Stateful
from ess.engine.step.way import Way, WholeModel
from ess.errors import BadInput
from ess.models.compressed.model import CompressedModel
from ess.models.model import Model


class OverEntries:
    def __init__(self, model: CompressedModel, offload: Offload) -> None:
        self.heads = AllHeads()
        self._memory = Memory(offload, model.config)
        [self._scale] = {layer.attention.scale for layer in model.blocks}

    def decoded(self, runner: Runner, batch: Batch, fed: StepInput, draft_count: int) -> StepOutput:
        scaled, tokens = replace(batch, scale=self._scale), Tokens.of(self._memory, batch.step)
        entered = EntryBatch(runner, scaled, tokens, fed.tokens)
        streams = entered.through()
        _, logits = ended(scaled, runner.model, streams)
        chosen = fed.choose(logits)
        output = chosen.with_drafts(draft(entered, streams, chosen, draft_count))
        self._memory.keep(batch.step, output.accepted)
        return output

    def prefilled(
        self, runner: Runner, spans: Sequence[Span], on_layer: Callable[[int], None] | None
    ) -> list[Prefilled]:
        pack, ran = packed(runner, spans), run_spans(runner, self._memory, spans, on_layer)
        pairs = zip(spans, ran, strict=True)
        return [Prefilled(pack, span, made.windows, made.streams) for span, made in pairs]


def way_of(model: Model, offload: Offload, config: EngineConfig, *, is_alone: bool) -> Way:
    """The way of an engine's steps; `is_alone`: it divides nothing among ranks."""
    check_settings(model.config, config)
    if not lacks(model.config):
        return WholeModel()
    if not is_alone:
        raise BadInput(f"{model.config.family}: its states and experts stay in one engine")
    return OverEntries(model, offload) if isinstance(model, CompressedModel) else Stateful()
