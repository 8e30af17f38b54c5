"""How a step goes through a model whose requests keep a state of their newest token beside rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ess.door import Sequence as Opened
from ess.engine.layers.batch import Batch
from ess.engine.layers.beside import Carried
from ess.engine.prompt.pack import Span
from ess.engine.prompt.run import Prefilled, run_chunks
from ess.engine.step.feeding import StepInput, StepOutput
from ess.engine.step.runner import Runner
from ess.engine.step.way import WholeModel
from ess.pool.warmup import WINDOW_MAX


class Stateful(WholeModel):
    def decoded(self, runner: Runner, batch: Batch, fed: StepInput, draft_count: int) -> StepOutput:
        assert batch.carried is not None, "a model without states"
        batch.carried.begin()
        output = super().decoded(runner, batch, fed, draft_count)
        batch.carried.end(1)
        return output

    def prefilled(
        self, runner: Runner, spans: Sequence[Span], on_layer: Callable[[int], None] | None
    ) -> list[Prefilled]:
        """Runs the spans in pieces that end where states are kept: first the first piece of each
        span, then the second of each, and so on."""
        parts_of: list[list[Prefilled]] = [[] for _ in spans]
        rounds = list(itertools.zip_longest(*(_cut(runner, span) for span in spans)))
        for round_ in rounds:
            placed = [(place, piece) for place, piece in enumerate(round_) if piece is not None]
            listener = on_layer if round_ is rounds[-1] else None
            ran = _ran(runner, [piece for _, piece in placed], listener)
            for (place, _), each in zip(placed, ran, strict=True):
                parts_of[place].append(each)
        return [_joined(span, parts) for span, parts in zip(spans, parts_of, strict=True)]


def _opened(span: Span) -> Opened:
    assert isinstance(span.sequence, Opened), "a span of no open sequence"
    return span.sequence


def _cut(runner: Runner, span: Span) -> list[Span]:
    """Each piece with the state that it continues from."""
    sequence, beside = _opened(span), runner.beside
    assert beside is not None, "a model without states"
    ends = sorted({*sequence.kept_ends(span.start, span.stop), span.stop})
    return [
        replace(
            span,
            start=begin,
            tokens=span.tokens[begin - span.start : end - span.start],
            following=span.following[begin - span.start : end - span.start],
            windows={},
            carried=Carried(beside, torch.tensor([sequence.line]), torch.tensor([begin])),
        )
        for begin, end in itertools.pairwise([span.start, *ends])
    ]


def _ran(
    runner: Runner, pieces: Sequence[Span], on_layer: Callable[[int], None] | None
) -> list[Prefilled]:
    carried = [piece.carried for piece in pieces if piece.carried is not None]
    for each in carried:
        each.begin()
    ran = run_chunks(runner, pieces, on_layer)
    for each, piece in zip(carried, pieces, strict=True):
        each.end(len(piece.tokens))
        _opened(piece).reached(piece.stop)
    return ran


def _joined(span: Span, parts: Sequence[Prefilled]) -> Prefilled:
    windows = torch.cat([part.windows for part in parts], 1)[:, -WINDOW_MAX:].contiguous()
    return Prefilled(parts[0].pack, span, windows, torch.cat([part.hidden for part in parts]))
