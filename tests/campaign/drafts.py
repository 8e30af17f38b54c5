"""Drafts that are right as often as is drawn: those of random weights hardly ever are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from ess.engine.entries import over
from ess.engine.step import way

Texts = Callable[[], Mapping[Any, list[int]]]
"""Of each sequence that is open its prompt and what must be said behind it."""


class Drafts:
    def __init__(self, texts: Texts, *, vocabulary: int, right: float, seed: int) -> None:
        self.right_count = 0
        self._texts = texts
        self._vocabulary = vocabulary
        self._right = right
        self._draw = random.Random(seed)

    def guess(self, sequences: Sequence[Any], behind: Sequence[int], guesses: Tensor) -> Tensor:
        """In place of `guesses` what stands from `behind` on, or what does not."""
        texts = self._texts()
        for place, (sequence, first) in enumerate(zip(sequences, behind, strict=True)):
            text = texts.get(sequence, [])
            for at, token in enumerate(text[first : first + guesses.shape[1]]):
                is_right = self._draw.random() < self._right
                guesses[place, at] = token if is_right else (token + 1) % self._vocabulary
                self.right_count += is_right
        return guesses


@contextmanager
def made_by(drafts: Drafts) -> Iterator[None]:
    """The MTP module runs all the same."""
    rows, entries = way.draft, over.draft

    def of_rows(runner: Any, batch: Any, hidden: Any, following: Any, last: Any, count: int) -> Any:
        guesses = rows(runner, batch, hidden, following, last, count)
        return drafts.guess(batch.step.sequences, (batch.lengths[last] + 1).tolist(), guesses)

    def of_entries(entered: Any, streams: Any, chosen: Any, count: int) -> Any:
        guesses = entries(entered, streams, chosen, count)
        if guesses is None:
            return None
        behind = [int(entered.tokens.positions[last]) + 2 for last in chosen.last]
        return drafts.guess(entered.batch.step.sequences, behind, guesses)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(way, "draft", of_rows)
        patch.setattr(over, "draft", of_entries)
        yield
