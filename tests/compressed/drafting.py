"""Drafts that are right as often as a test wants, and what the engine made of them.

Random weights guess wrong nearly always. So these drafts come from a list of each request's true
tokens, with a wrong token behind a chosen number of right ones; the MTP module runs all the same.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from ess.engine.engine import Engine
from ess.engine.entries import over
from ess.models.model import Model
from tests.support.greedy import made_once

VOCABULARY, WINDOW = 96, 8


@dataclass
class Drafted:
    """One entry for each sequence of each step: where it began, how many tokens were verified, how
    many of them were kept; and the drafts behind them, as the module made them."""

    steps: list[tuple[int, int, int]] = field(default_factory=list)
    guesses: list[list[int]] = field(default_factory=list)

    def note(self, entered: Any, chosen: Any, guesses: Tensor) -> None:
        step = entered.batch.step
        each = zip(step.firsts, step.query_counts, chosen.last, guesses.tolist(), strict=True)
        for first, count, last, guessed in each:
            begin = int(entered.tokens.positions[first])
            self.steps.append((begin, count, int(last) - first + 1))
            self.guesses.append(guessed)


def watched(monkeypatch: pytest.MonkeyPatch) -> Drafted:
    """Drafts as they are."""
    return replaced(monkeypatch, lambda entered, chosen, guesses: guesses)


def replaced(
    monkeypatch: pytest.MonkeyPatch, other: Callable[[Any, Any, Tensor], Tensor]
) -> Drafted:
    made, drafted = over.draft, Drafted()

    def draft(entered: Any, streams: Tensor, chosen: Any, count: int) -> Tensor | None:
        guesses = made(entered, streams, chosen, count)
        if guesses is None:
            return None
        drafted.note(entered, chosen, guesses)
        return other(entered, chosen, guesses)

    monkeypatch.setattr(over, "draft", draft)
    return drafted


def known(monkeypatch: pytest.MonkeyPatch, model: Model, *, seed: int) -> Drafted:
    """Of all requests that are added from here on, whose tokens are the greedy ones. How many
    drafts are right is drawn of those counts that steps from such an offset had least often."""
    draw, texts, had = random.Random(seed), Texts(monkeypatch, model), Counter[tuple[int, int]]()

    def other(entered: Any, chosen: Any, guesses: Tensor) -> Tensor:
        for place, sequence in enumerate(entered.batch.step.sequences):
            behind = int(entered.tokens.positions[chosen.last[place]]) + 2
            true = texts.of(sequence.tokens)[behind : behind + guesses.shape[1]]
            offset, counts = (behind - 1) % WINDOW, range(guesses.shape[1] + 1)
            right = min(counts, key=lambda count: (had[offset, count], draw.random()))
            had[offset, right] += 1
            wrong = [(token + 1) % VOCABULARY for token in true[right : right + 1]]
            told = true[:right] + wrong
            guesses[place, : len(told)] = torch.tensor(told, dtype=torch.int64)
        return guesses

    return replaced(monkeypatch, other)


class Texts:
    """The prompts that engines are given, and what the plain model says behind each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
        self._model = model
        self._texts: dict[tuple[int, ...], list[int]] = {}
        self._counts: dict[tuple[int, ...], int] = {}
        add = Engine.add

        def noted(
            engine: Engine, prompt: Sequence[int], sampling: Any = None, **wishes: Any
        ) -> Any:
            key = tuple(prompt)
            self._counts[key] = max(self._counts.get(key, 0), sampling.tokens_max)
            return add(engine, prompt, sampling, **wishes)

        monkeypatch.setattr(Engine, "add", noted)

    def of(self, tokens: Sequence[int]) -> list[int]:
        """The whole text that begins with these, which are a whole prompt or more. A longer prompt
        may begin with a shorter one, which says something else behind it."""
        begun = tuple(tokens)
        for prompt in sorted(self._counts, key=len, reverse=True):
            if begun[: len(prompt)] == prompt:
                text = self._text(prompt)
                if text[: len(begun)] == [*begun]:
                    return text
        return []

    def _text(self, prompt: tuple[int, ...]) -> list[int]:
        count = self._counts[prompt]
        if len(self._texts.get(prompt, ())) != len(prompt) + count:
            self._texts[prompt] = [*prompt, *made_once(self._model, prompt, count)]
        return self._texts[prompt]
