"""A step's input tokens and its choices: the same calls on a host and on a device.

    future.feed(step, turns, counts) -> fed    the newest tokens and the drafts behind them
    fed.choose(logits) -> chosen               the targets up to the first wrong draft
    chosen.with_drafts(drafts) -> output       what the next launch takes of it
    output.tell(fed)                           what the host takes of it

`FutureMap` does it in the host's memory, `DeviceFuture` on a device, where the host reads no number
before the host learns the step. There all between `feed` and `tell` may be a graph: then the
output comes from the step that was captured, and `tell` is given what the replaying one was fed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from ess.door import Step
from ess.engine.plan import Feed, Turn
from ess.engine.tokens.verification import Choice

Counts: TypeAlias = Any
"""For each sequence: a list on the host, a tensor on a device."""


class Outcome(NamedTuple):
    """A step's results for one feed: the targets up to the first wrong draft, and new drafts."""

    feed: Feed
    choice: Choice
    drafts: tuple[int, ...]

    @property
    def verified(self) -> tuple[int, int]:
        """Drafts that were checked and how many were right."""
        return len(self.feed.tokens) - 1, len(self.choice.tokens) - 1


class Chosen(Protocol):
    @property
    def last(self) -> Counts:
        """The query of each sequence whose token is the newest that was kept."""

    @property
    def following(self) -> Tensor:
        """The token behind each query; behind a wrong draft, anything."""

    def with_drafts(self, drafts: Tensor | None) -> StepOutput:
        """`drafts` [sequences, n] are behind the newest tokens."""


class StepOutput(Protocol):
    @property
    def accepted(self) -> Counts:
        """How many of its new rows each sequence keeps; pads may follow."""

    def tell(self, fed: Any) -> None:
        """Ends the launch of the step with this feed."""


class StepInput(Protocol):
    @property
    def tokens(self) -> Tensor:
        """The token of each query."""

    @property
    def form(self) -> Hashable:
        """The key that, with the numbers of queries, determines the work of `choose`."""

    def choose(self, logits: Tensor) -> Chosen: ...


class Future(Protocol):
    def stash(self, line: int, tokens: Sequence[int]) -> None: ...
    def forget(self, line: int) -> None: ...
    def feed(self, step: Step, turns: Sequence[Turn], counts: Sequence[int]) -> StepInput:
        """`counts` are the queries of each sequence, pads among them."""

    def has_landed(self) -> bool:
        """Whether `learn` need not wait for the results of the oldest step."""

    def learn(self, step_number: int) -> tuple[Outcome, ...]: ...
    def step_numbers(self) -> list[int]: ...
    def held(self, line: int) -> list[int]: ...
    def lines(self) -> set[int]: ...
    def check(self) -> None: ...
