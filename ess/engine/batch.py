"""What one engine step will do and what it has done: frozen, handed from part to part."""

from __future__ import annotations

from dataclasses import dataclass

from ess.engine.chances import Chance
from ess.engine.request import Request


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [start, stop) of one prompt; the last prompt token is left to decode."""

    request: Request
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.request.prompt) - 1


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a decode batch: its last token, then the drafts to verify."""

    request: Request
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    lines: tuple[Line, ...]
    chunk: Chunk | None

    @property
    def is_empty(self) -> bool:
        return not self.lines and self.chunk is None


@dataclass(frozen=True, slots=True)
class Made:
    """The new tokens of one request in one step, and its guesses for the next one.

    Tokens behind one that ends the request are surplus. `chances` are of each token, if asked for.
    """

    request: Request
    tokens: tuple[int, ...]
    drafts: tuple[int, ...]
    chances: tuple[Chance, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    made: tuple[Made, ...]
    chunk: Chunk | None
