"""How long the next prefill chunk may be, so that every chunk takes about the same time.

Prefilling n tokens takes T(n) = quadratic n^2 + linear n: each token attends to all before it. A
chunk of c tokens after h others takes T(h + c) - T(h), so equal chunks take longer and longer, and
in a pipeline every stage waits for the longest chunk. The strict next chunk solves

    T(h + c) - T(h) = T(first)

for c. A quadratic is only an estimate, and small chunks use the hardware badly, so the answer is
moved toward the first chunk: c' = first + smoothing (c - first); 0 keeps the size, 1 follows the
estimate. It is never below a quarter of the first chunk nor above what is left of the context, and
is a multiple of max(page, 64), except for a tail that is shorter than that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ess.errors import BadInput
from ess.units import PAGE_ROWS

FLOOR_SHARE: Final = 4
SMOOTHING_DEFAULT: Final = 0.75
ROUNDING: Final = 1e-3  # of a token: a size that misses a multiple by less has not missed it


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTime:
    """Seconds to prefill n tokens from nothing: quadratic n^2 + linear n."""

    quadratic: float
    linear: float

    def __post_init__(self) -> None:
        if not (self.quadratic > 0 and math.isfinite(self.quadratic)):
            raise BadInput(
                f"prefill time with a quadratic term of {self.quadratic:g}: it must be above 0, "
                "or later chunks cost no more than early ones; use chunks of one size"
            )
        if not (self.linear >= 0 and math.isfinite(self.linear)):
            raise BadInput(f"{self}: the linear term must be finite and not negative")

    def of(self, tokens: float, *, after: float = 0.0) -> float:
        """Seconds for a chunk of `tokens` behind `after` others."""
        return tokens * (self.quadratic * (tokens + 2 * after) + self.linear)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunking:
    """What an operator sets. Smoothing 0 makes every chunk the first one's size."""

    first: int
    context: int
    page: int = PAGE_ROWS
    smoothing: float = SMOOTHING_DEFAULT

    def __post_init__(self) -> None:
        if self.page < 1 or self.context < 1:
            raise BadInput(f"page {self.page} and context {self.context} must be positive")
        if self.first < self.unit or self.first % self.unit:
            raise BadInput(f"the first chunk of {self.first} is no multiple of {self.unit} tokens")
        if not 0 <= self.smoothing <= 1:
            raise BadInput(f"smoothing {self.smoothing} must lie in 0 (static) to 1 (strict)")

    @property
    def unit(self) -> int:
        return max(self.page, PAGE_ROWS)

    @property
    def floor(self) -> int:
        return self.first // FLOOR_SHARE


def next_chunk(time: PrefillTime, chunking: Chunking, *, done: int) -> int:
    """Tokens of the chunk that follows `done` tokens."""
    if not 0 <= done < chunking.context:
        raise BadInput(f"{done} tokens are done of a context of {chunking.context}: no chunk fits")
    left, unit = chunking.context - done, chunking.unit
    whole = left // unit * unit if left >= unit else left
    chunk = min(wanted_chunk(time, chunking, done=done), whole)
    assert 0 < chunk <= left, f"a chunk of {chunk} where {left} are left"
    return chunk


def wanted_chunk(time: PrefillTime, chunking: Chunking, *, done: int) -> int:
    """The same without an end of the context: always a multiple of the unit."""
    smooth = chunking.first + chunking.smoothing * (
        _strict(time, chunking.first, done) - chunking.first
    )
    wanted = max(int(smooth + ROUNDING), chunking.floor) // chunking.unit * chunking.unit
    chunk = max(wanted, chunking.unit)
    assert chunk <= chunking.first, f"a chunk of {chunk} is longer than the first"
    return chunk


def chunks(time: PrefillTime, chunking: Chunking, *, prompt: int, done: int = 0) -> tuple[int, ...]:
    """All chunks of a prompt behind its `done` tokens, in order; the last chunk has the rest."""
    if not 0 < prompt <= chunking.context:
        raise BadInput(f"a prompt of {prompt} tokens, the context holds {chunking.context}")
    sizes: list[int] = []
    while done < prompt:
        sizes.append(min(next_chunk(time, chunking, done=done), prompt - done))
        done += sizes[-1]
    assert done == prompt, f"chunks of {done} tokens for a prompt of {prompt}"
    return tuple(sizes)


def _strict(time: PrefillTime, first: int, done: int) -> float:
    """The positive root of quadratic c^2 + (2 quadratic done + linear) c = T(first).

    In the form that subtracts nothing, so it stays exact where the quadratic term is tiny.
    """
    slope = 2 * time.quadratic * done + time.linear
    target = time.of(first)
    return 2 * target / (slope + math.sqrt(slope * slope + 4 * time.quadratic * target))
