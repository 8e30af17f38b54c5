"""What one engine step will do and what it has done: frozen, handed from part to part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ess.engine.request import Request
from ess.engine.tokens.chance import Chance

if TYPE_CHECKING:
    from ess.door import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [start, stop) of one prompt; the last prompt token is left to decode."""

    request: Request
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.request.prefill_count


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a decode batch and how many tokens it has verified: no more is planned."""

    request: Request
    count: int

    @property
    def sequence(self) -> Sequence:
        assert self.request.sequence is not None, f"request {self.request.number} has no rows"
        return self.request.sequence


@dataclass(frozen=True, slots=True)
class Feed:
    """What a turn feeds into the model: its newest token, then the drafts to verify, from
    `position` on."""

    request: Request
    tokens: tuple[int, ...]
    position: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    turns: tuple[Turn, ...]
    chunk: Chunk | None


@dataclass(frozen=True, slots=True)
class Made:
    """The new tokens of one request in one step, and its guesses for the next one.

    `chances` are of each token, if asked for.
    """

    request: Request
    tokens: tuple[int, ...]
    drafts: tuple[int, ...]
    chances: tuple[Chance, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the host has learned in this step, and what it has put under way; `scored` are tokens
    of the chunk's prompt, if asked for."""

    made: tuple[Made, ...]
    chunk: Chunk | None
    turn_count: int = 0
    scored: tuple[Chance, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing could run and nothing was under way."""
        return not self.made and self.chunk is None and self.turn_count == 0
