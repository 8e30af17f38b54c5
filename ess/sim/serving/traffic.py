"""Requests from a seed: their arrivals, lengths, and right drafts.

A request's draws depend on the seed and on its own number, never on other requests, so two systems
that replay the same requests differ by their design and not by luck.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ess.errors import BadInput
from ess.sim.serving.arrivals import Arrival

ARRIVALS: Final = 5
DRAFTS: Final = 6
COUNT_MAX: Final = 1 << 20
BURST_LEAST: Final = 0.01
BURST_MOST: Final = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Arrivals, `rate` a second. Gaps follow a gamma distribution of shape `burst`: 1 is a Poisson
    process, less comes in bursts, more comes evenly. Lengths are means; `spread` is the deviation
    of their logarithm: 0 makes all equal, 1 is about that of public chat traces."""

    rate: float
    count: int
    prompt_tokens: int
    output_tokens: int
    spread: float = 0.0
    burst: float = 1.0

    def __post_init__(self) -> None:
        check_rate(self.rate)
        if not 1 <= self.count <= COUNT_MAX:
            raise BadInput(f"{self.count} requests: between 1 and {COUNT_MAX} can be drawn")
        if min(self.prompt_tokens, self.output_tokens) < 1:
            lengths = f"prompts of {self.prompt_tokens} and outputs of {self.output_tokens} tokens"
            raise BadInput(f"{lengths}: both must be 1 or more")
        if not 0.0 <= self.spread <= 3.0:
            raise BadInput(
                f"a spread of {self.spread} is outside 0..3, the deviation of log length"
            )
        if not BURST_LEAST <= self.burst <= BURST_MOST:
            raise BadInput(
                f"a burst of {self.burst} is outside {BURST_LEAST:g}..{BURST_MOST:g}, "
                "the shape of the gaps between arrivals"
            )


def draw(mix: Mix, *, seed: int) -> list[Arrival]:
    check_seed(seed)
    rng = np.random.default_rng([seed, ARRIVALS])
    gaps = rng.standard_gamma(mix.burst, mix.count) * (1.0 / mix.rate) / mix.burst
    at = np.cumsum(gaps) - gaps[0]
    factors = np.exp(mix.spread * rng.standard_normal((mix.count, 2)) - mix.spread**2 / 2)
    return [
        Arrival(
            at_s=float(when),
            prompt_tokens=_length(mix.prompt_tokens, prompt),
            output_tokens=_length(mix.output_tokens, output),
        )
        for when, (prompt, output) in zip(at, factors.tolist(), strict=True)
    ]


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same requests in the same order, with times stretched to `rate` arrivals per second."""
    check_rate(rate)
    span = arrivals[-1].at_s
    if span <= 0.0:
        raise BadInput(
            f"{len(arrivals)} requests arrive at one moment: they have no rate to change"
        )
    factor = (len(arrivals) - 1) / rate / span
    return [replace(arrival, at_s=arrival.at_s * factor) for arrival in arrivals]


def chance_of(accepted: float, *, depth: int) -> float:
    """The chance of each draft, in turn, at which a step of this depth makes `accepted` tokens.

    >>> round(chance_of(1.7, depth=2), 6)
    0.7
    """
    if not 1.0 <= accepted <= depth:
        raise BadInput(f"{accepted} accepted tokens with mtp {depth}: between 1 and {depth} a step")
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        expected = math.fsum(middle**place for place in range(depth))
        low, high = (middle, high) if expected < accepted else (low, middle)
    return high


def right_drafts(*, seed: int, number: int, chance: float, steps: int, depth: int) -> bytes:
    """For each step that a request can take: how many of its first drafts are right."""
    rng = np.random.default_rng([seed, DRAFTS, number])
    is_right = rng.random((steps, depth - 1)) < chance
    counts = np.cumprod(is_right, axis=1).sum(axis=1)
    return bytes(counts.astype(np.uint8))


def check_seed(seed: int) -> None:
    if seed < 0:
        raise BadInput(f"a seed of {seed}: it must be 0 or more")


def check_rate(rate: float) -> None:
    if not (rate > 0.0 and math.isfinite(rate)):
        raise BadInput(f"a rate of {rate} requests per second must be above 0 and finite")


def _length(mean: int, factor: float) -> int:
    return max(1, round(mean * factor))
