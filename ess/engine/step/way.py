"""How a step goes through the model: all of it here, or from rank to rank (`engine.mesh`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ess.engine.layers.batch import Batch
from ess.engine.layers.heads import AllHeads, Heads
from ess.engine.prompt.pack import Span
from ess.engine.prompt.run import Prefilled, run_chunks
from ess.engine.step.drafts import draft
from ess.engine.step.feeding import Chosen, StepInput, StepOutput
from ess.engine.step.runner import Forward, Runner


class Way(Protocol):
    @property
    def heads(self) -> Heads: ...

    def decoded(self, runner: Runner, batch: Batch, fed: StepInput, draft_count: int) -> StepOutput:
        """The results of the step, once its rows have been made in every layer of this runner."""

    def prefilled(
        self, runner: Runner, spans: Sequence[Span], on_layer: Callable[[int], None] | None
    ) -> list[Prefilled]:
        """`on_layer` is told of each layer when its rows are stored."""


class WholeModel:
    def __init__(self) -> None:
        self.heads = AllHeads()

    def decoded(self, runner: Runner, batch: Batch, fed: StepInput, draft_count: int) -> StepOutput:
        forward = runner.decode(batch, fed.tokens)
        chosen = fed.choose(forward.logits)
        return chosen.with_drafts(drafted(runner, batch, forward, chosen, draft_count))

    def prefilled(
        self, runner: Runner, spans: Sequence[Span], on_layer: Callable[[int], None] | None
    ) -> list[Prefilled]:
        return run_chunks(runner, spans, on_layer)


def drafted(
    runner: Runner, batch: Batch, forward: Forward, chosen: Chosen, count: int
) -> Tensor | None:
    """Before the step is sealed, for drafting makes the rows of the MTP layer."""
    if not (runner.offload.layout.mtp_layer_count and count):
        return None
    return draft(runner, batch, forward.hidden, chosen.following, chosen.last, count)
