"""What users saw of a replay: time to the first token, time per token, requests within both.

Time per token is that of one request: from its first step to its last, over all its tokens but the
first. Goodput counts requests whose two times were within the objective, so no refused ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ess.errors import BadInput
from ess.sim.serving.decode_rank import Life
from ess.sim.serving.replay import Replay

PERCENTS: Final = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Seconds to the first token, and seconds for each further token."""

    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.tpot_s > 0):
            raise BadInput(
                f"an objective of {self.ttft_s} s and {self.tpot_s} s: both must be above 0"
            )

    def is_met(self, life: Life) -> bool:
        if life.end_s is None:
            return False
        tpot = tpot_s(life)
        return ttft_s(life) <= self.ttft_s and (tpot is None or tpot <= self.tpot_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Rates are per second of the replay; batch and misses are means over the time of its steps.

    `waited_s`: by limiter, for how long the first request in the queue lacked it.
    """

    request_count: int
    served_count: int
    refused: dict[str, int]
    seconds: float
    tokens_per_s: float
    ttft_s: Spread | None
    tpot_s: Spread | None
    good_share: float
    good_per_s: float
    batch_mean: float
    batch_peak: int
    misses_mean: float
    exposed_share: float
    busy_share: float
    waited_s: dict[str, float]


def summarise(replayed: Replay, objective: Objective) -> Summary:
    served = [life for life in replayed.lives if life.end_s is not None]
    good = sum(objective.is_met(life) for life in served)
    refused = Counter(life.refused for life in replayed.lives if life.refused is not None)
    rank, seconds = replayed.rank, max(replayed.seconds, 1e-9)
    busy_s = max(rank.busy_s, 1e-9)
    return Summary(
        request_count=len(replayed.lives),
        served_count=len(served),
        refused=dict(sorted(refused.items())),
        seconds=replayed.seconds,
        tokens_per_s=sum(life.made for life in served) / seconds,
        ttft_s=_spread([ttft_s(life) for life in served]),
        tpot_s=_spread([each for life in served if (each := tpot_s(life)) is not None]),
        good_share=good / len(replayed.lives),
        good_per_s=good / seconds,
        batch_mean=rank.batch_s / busy_s,
        batch_peak=rank.batch_peak,
        misses_mean=rank.missed_s / busy_s,
        exposed_share=rank.exposed_s / busy_s,
        busy_share=rank.busy_s / seconds,
        waited_s=dict(sorted(rank.waited_s.items())),
    )


def ttft_s(life: Life) -> float:
    assert life.first_s is not None, f"request {life.number} has no first token"
    return life.first_s - life.arrival.at_s


def tpot_s(life: Life) -> float | None:
    """None for a request of one token: it has no second."""
    assert life.first_s is not None, f"request {life.number} has no first token"
    assert life.end_s is not None, f"request {life.number} has no end"
    further = life.made - 1
    return (life.end_s - life.first_s) / further if further else None


def _spread(seconds: Sequence[float]) -> Spread | None:
    if not seconds:
        return None
    p50, p90, p99 = np.percentile(seconds, PERCENTS).tolist()
    return Spread(p50=p50, p90=p90, p99=p99)
