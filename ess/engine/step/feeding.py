"""What a step is fed with and what it has chosen: the same calls wherever its tokens are.

    future.feed(step, turns) -> fed        the newest tokens and the drafts behind them
    fed.choose(logits) -> chosen           the targets up to the first wrong draft
    chosen.say(drafts)                     what the next launch and the host take of it

`FutureMap` does it in the host's memory, `DeviceFuture` on a device, where nobody reads a number
before the host learns the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from ess.door import Step
from ess.engine.plan import Feed, Turn
from ess.engine.tokens.verification import Choice

Counts: TypeAlias = Any
"""For each sequence: a list on the host, a tensor on a device."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step has said for one feed: the targets up to the first wrong draft, new drafts."""

    feed: Feed
    choice: Choice
    drafts: tuple[int, ...]

    @property
    def verified(self) -> tuple[int, int]:
        """Drafts that were checked and how many were right."""
        return len(self.feed.tokens) - 1, len(self.choice.tokens) - 1


class Chosen(Protocol):
    @property
    def accepted(self) -> Counts:
        """How many of its new rows each sequence keeps."""

    @property
    def last(self) -> Counts:
        """Of each sequence, the query whose token is the newest that was kept."""

    @property
    def following(self) -> Tensor:
        """The token behind each query; behind a wrong draft, anything."""

    def say(self, drafts: Tensor | None) -> None:
        """Ends the launch. `drafts` [sequences, n] are behind the newest tokens."""


class Fed(Protocol):
    @property
    def tokens(self) -> Tensor:
        """The token of each query."""

    def choose(self, logits: Tensor) -> Chosen: ...


class Future(Protocol):
    def stash(self, line: int, tokens: Sequence[int]) -> None: ...
    def forget(self, line: int) -> None: ...
    def feed(self, step: Step, turns: Sequence[Turn]) -> Fed: ...
    def learn(self, step_number: int) -> tuple[Outcome, ...]: ...
    def step_numbers(self) -> list[int]: ...
    def held(self, line: int) -> list[int]: ...
    def lines(self) -> set[int]: ...
    def check(self) -> None: ...
