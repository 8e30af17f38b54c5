"""What one engine step will do and what it has done: frozen, handed from part to part.

Objects that are made for each request of a step are tuples: a frozen dataclass takes three times as
long.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ess.engine.requests.request import Request
from ess.engine.tokens.chance import Chance

if TYPE_CHECKING:
    from ess.door import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [start, stop) of one prompt; the last prompt token is left to decode."""

    request: Request
    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.stop, f"an empty chunk [{self.start}, {self.stop})"
        assert self.stop <= self.request.prefill_count, "the last prompt token is not prefilled"

    @property
    def count(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        return self.stop == self.request.prefill_count


class Turn(NamedTuple):
    """One request of a decode batch, and how many tokens the step verifies for it."""

    request: Request
    query_count: int

    @property
    def sequence(self) -> Sequence:
        assert self.request.sequence is not None, f"request {self.request.number} has no rows"
        return self.request.sequence


class Feed(NamedTuple):
    """What a turn feeds into the model: its newest token, then the drafts to verify, from
    `position` on."""

    request: Request
    tokens: tuple[int, ...]
    position: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`chunks` are of different requests; of these only the last may end inside its prompt."""

    turns: tuple[Turn, ...]
    chunks: tuple[Chunk, ...]

    def __post_init__(self) -> None:
        assert all(chunk.is_last for chunk in self.chunks[:-1]), "two prompts are cut in one step"


class NewTokens(NamedTuple):
    """The new tokens of one request in one step, and the drafts for its next step.

    `chances` are those of each token, if the request asks for them.
    """

    request: Request
    tokens: tuple[int, ...]
    drafts: tuple[int, ...]
    chances: tuple[Chance, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results that the host has learned in this step, and the work that it has launched.
    `scored` holds, for each chunk, the log probabilities of its prompt's tokens, if the request
    asks for them."""

    made: tuple[NewTokens, ...]
    chunks: tuple[Chunk, ...]
    turn_count: int = 0
    scored: tuple[tuple[Chance, ...], ...] = ()

    def __post_init__(self) -> None:
        assert len(self.scored) == len(self.chunks), f"{len(self.scored)} of {len(self.chunks)}"

    @property
    def is_empty(self) -> bool:
        """Nothing could run and nothing was under way."""
        return not self.made and not self.chunks and self.turn_count == 0
