"""One decode GPU and the prefill GPUs that feed it, as a replay takes them.

A tier is given, or sized for a rate of requests: the fewest GPUs whose queue lets nine in ten see
their first token in time, by the planner's own search, with prompts of their mean length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from ess.pool.capacity import SLOTS
from ess.sim.locality.misses import PUBLISHED_QUERIES
from ess.sim.planning.deployment import Prefilling
from ess.sim.planning.fleet import Wanted, smallest_tier
from ess.sim.planning.node import Node
from ess.sim.planning.planner import Planner
from ess.sim.planning.prefilling import tier_of
from ess.sim.serving.arrivals import Arrival
from ess.sim.serving.asked import AUTO, Serving
from ess.sim.serving.decode_rank import Rank
from ess.sim.serving.goodput import summarise
from ess.sim.serving.replay import Drafting, Replay, replay
from ess.sim.serving.traffic import at_rate
from ess.sim.step_grid import StepTimes

GOOD_SHARE: Final = 0.9
RATE_MIN: Final = 1 / 64
RATE_MAX: Final = 64.0
RATE_STEP: Final = 1.05

Size = tuple[int, int]
"""Pipelines and GPUs of each."""


class Sustained(NamedTuple):
    """The highest rate per decode GPU, and the GPUs that it takes, that one among them."""

    rate: float
    gpu_count: int

    @property
    def rate_each(self) -> float:
        return self.rate / self.gpu_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What both replays share. Without a `slot_floor` every row has a slot."""

    planner: Planner
    serving: Serving
    node: Node
    times: StepTimes
    prefilling: Prefilling
    drafting: Drafting
    cached: list[int]

    def replayed(
        self, arrivals: Sequence[Arrival], *, slot_floor: int | None, size: Size | None
    ) -> Replay:
        tier = None if size is None else tier_of(self.planner, self.prefilling, self.node, size)
        return replay(
            arrivals,
            self.rank(arrivals, slot_floor=slot_floor),
            tier=tier,
            drafting=self.drafting,
            waiting_max=self.serving.waiting_max,
            cached=self.cached,
        )

    def size(self, arrivals: Sequence[Arrival]) -> Size | None:
        """None where prefill runs beside decode."""
        if self.serving.tier != AUTO:
            return self.serving.tier
        seconds = max(arrivals[-1].at_s, 1.0)
        return self.sized(len(arrivals) / seconds, arrivals)

    def sized(self, rate: float, arrivals: Sequence[Arrival]) -> Size:
        count = len(arrivals)
        prompt = max(2, round(math.fsum(each.prompt_tokens for each in arrivals) / count))
        cached = min(round(math.fsum(self.cached) / count), prompt - 1)

        def through(stages: int) -> tuple[float, float]:
            alone = tier_of(self.planner, self.prefilling, self.node, (1, stages))
            return alone.seconds(prompt, cached=cached)

        wanted = Wanted(rate=rate, ttft_s=self.serving.objective.ttft_s)
        tier = smallest_tier(wanted, through, first_step_s=self.serving.objective.tpot_s)
        return tier.count, tier.gpus_each

    def sustained(self, arrivals: Sequence[Arrival], *, slot_floor: int | None) -> Sustained:
        """The highest rate, to 5 %, at which enough requests meet the objective; 0 if none does.

        The same requests arrive closer together or further apart, and a tier that is not given is
        sized for every rate. `RATE_MAX` means that they are few enough to run all at once. The
        search assumes that a rank which sustains a rate sustains every lower rate too.
        """

        def gpus_if_met(rate: float) -> int | None:
            stretched = at_rate(arrivals, rate)
            size = self.sized(rate, arrivals) if self.serving.tier == AUTO else self.size(stretched)
            lived = self.replayed(stretched, slot_floor=slot_floor, size=size)
            good_share = summarise(lived, self.serving.objective).good_share
            return gpu_count(size) if good_share >= GOOD_SHARE else None

        gpus = gpus_if_met(RATE_MIN)
        if gpus is None:
            return Sustained(0.0, 1)
        low, high = Sustained(RATE_MIN, gpus), RATE_MAX
        gpus = gpus_if_met(high)
        if gpus is not None:
            return Sustained(high, gpus)
        while high / low.rate > RATE_STEP:
            middle = math.sqrt(low.rate * high)
            gpus = gpus_if_met(middle)
            low, high = (low, middle) if gpus is None else (Sustained(middle, gpus), high)
        return low

    def rank(self, arrivals: Sequence[Arrival], *, slot_floor: int | None) -> Rank:
        lengths = [arrival.prompt_tokens + arrival.output_tokens for arrival in arrivals]
        serving, planner = self.serving, self.planner
        budget = planner.device_budget if slot_floor is None else planner.budget
        return Rank(
            make_ledger=lambda: budget.split_for(lengths, slot_floor=slot_floor),
            slot_count=budget.split_for(lengths, slot_floor=slot_floor).free(SLOTS),
            slot_floor=slot_floor,
            times=self.times,
            missed=self.missed,
            depth=planner.ask.queries_each,
            target_ms=serving.objective.tpot_s * 1e3 if serving.is_paced else None,
            batch_max=serving.batch_max,
            chunk_max=serving.chunk_tokens,
            chunk_time=self.prefilling.time if serving.tier is None else None,
        )

    def missed(self, length: int, slots: float) -> float:
        """The curves, for the tokens that a step verifies."""
        queries = self.planner.ask.queries_each
        mean = self.planner.curves.mean(context=length, slots=slots)
        return min(mean * queries / PUBLISHED_QUERIES, float(queries * self.planner.layout.top_k))


def gpu_count(size: Size | None) -> int:
    """The decode GPU, and those that prefill for it."""
    return 1 if size is None else 1 + size[0] * size[1]
