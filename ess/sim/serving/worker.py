"""One decode GPU and the prefill GPUs that feed it, as a replay uses them.

If GPUs share heads, all GPUs of a group decode the same requests. A pipeline of stages has as many
micro-batches under way as stages; one of them is replayed, with its share of the GPUs: as many as
share heads, whatever the number of stages.

A tier is given, or sized for a rate of requests: the fewest GPUs whose queue lets nine in ten see
their first token in time, by the planner's search, with prompts of mean length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from ess.engine.chunking.sizes import PrefillTime
from ess.engine.step_bytes import positions_max
from ess.pool.capacity import SLOTS
from ess.sim.locality.misses import PUBLISHED_QUERIES
from ess.sim.planning.deployment import Prefilling
from ess.sim.planning.fleet import FleetGoal, smallest_tier
from ess.sim.planning.node import Node
from ess.sim.planning.planner import Planner
from ess.sim.planning.prefilling import tier_of
from ess.sim.serving.arrivals import Arrival
from ess.sim.serving.decode_rank import Rank
from ess.sim.serving.goodput import summarise
from ess.sim.serving.replay import Drafting, Replay, replay
from ess.sim.serving.replay_settings import AUTO, Serving
from ess.sim.serving.traffic import at_rate
from ess.sim.step_grid import StepClock, StepTime

GOOD_SHARE: Final = 0.9
RATE_MIN: Final = 1 / 64
RATE_MAX: Final = 64.0
RATE_STEP: Final = 1.05
ENDS_STEP: Final = 1.2
"""The precision to which the ends of a band are searched."""

Size = tuple[int, int]
"""Pipelines and GPUs of each."""


class SustainedRate(NamedTuple):
    """The highest rate per decode GPU or group of heads, and the GPUs that it takes."""

    rate: float
    gpu_count: int

    @property
    def rate_each(self) -> float:
        return self.rate / self.gpu_count


class ErrorFactors(NamedTuple):
    """Factors by which predictions are off: steps, prefill, and missed rows."""

    step: float = 1.0
    prefill: float = 1.0
    misses: float = 1.0


@dataclass(frozen=True, slots=True)
class ScaledSteps:
    """Step times that are off by a factor."""

    times: StepClock
    factor: float

    def at(self, *, requests: int, queries: int, context: float, misses: float) -> StepTime:
        time = self.times.at(requests=requests, queries=queries, context=context, misses=misses)
        return StepTime(self.factor * time.step_us, self.factor * time.exposed_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """What both replays share. Without a `slot_floor` every row has a slot."""

    planner: Planner
    serving: Serving
    node: Node
    times: StepClock
    prefilling: Prefilling
    drafting: Drafting
    cached: list[int]
    misses_off: float = 1.0

    def with_errors(self, off: ErrorFactors) -> Worker:
        time = self.prefilling.time
        slower = PrefillTime(
            quadratic=off.prefill * time.quadratic, linear=off.prefill * time.linear
        )
        return replace(
            self,
            times=ScaledSteps(self.times, off.step),
            prefilling=replace(self.prefilling, time=slower),
            misses_off=off.misses,
        )

    @property
    def decoding(self) -> int:
        """GPUs that decode."""
        return self.planner.ask.way.attention_tp

    def gpu_count(self, size: Size | None) -> int:
        """GPUs that decode, and those that prefill for them."""
        return self.decoding + (0 if size is None else size[0] * size[1])

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
        """The size of the tier; None if prefill runs beside decode."""
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

        wanted = FleetGoal(rate=rate, ttft_s=self.serving.objective.ttft_s)
        tier = smallest_tier(wanted, through, first_step_s=self.serving.objective.tpot_s)
        return tier.count, tier.gpus_each

    def sustained(
        self,
        arrivals: Sequence[Arrival],
        *,
        slot_floor: int | None,
        near: float = 1.0,
        step: float = RATE_STEP,
    ) -> SustainedRate:
        """The highest rate, to a factor of `step`, at which enough requests meet the objective; 0
        if there is none.

        The same requests arrive closer together or further apart, and a tier that is not given is
        sized for every rate. `RATE_MAX` means that there are so few requests that all can run at
        once. The search begins near a rate, and assumes that a rank which sustains a rate sustains
        every lower rate too.
        """
        low, high = SustainedRate(0.0, self.decoding), math.inf
        rate = min(max(near, RATE_MIN), RATE_MAX)
        while low.rate < RATE_MAX and high > max(RATE_MIN, step * low.rate):
            gpus = self._gpus_if_met(arrivals, rate, slot_floor)
            low, high = (low, rate) if gpus is None else (SustainedRate(rate, gpus), high)
            if low.rate and high < math.inf:
                rate = math.sqrt(low.rate * high)
            else:
                rate = max(high / 2, RATE_MIN) if gpus is None else min(2 * rate, RATE_MAX)
        return low

    def _gpus_if_met(
        self, arrivals: Sequence[Arrival], rate: float, slot_floor: int | None
    ) -> int | None:
        stretched = at_rate(arrivals, rate)
        size = self.sized(rate, arrivals) if self.serving.tier == AUTO else self.size(stretched)
        lived = self.replayed(stretched, slot_floor=slot_floor, size=size)
        good_share = summarise(lived, self.serving.objective).good_share
        return self.gpu_count(size) if good_share >= GOOD_SHARE else None

    def rank(self, arrivals: Sequence[Arrival], *, slot_floor: int | None) -> Rank:
        lengths = [arrival.prompt_tokens + arrival.output_tokens for arrival in arrivals]
        serving, planner = self.serving, self.planner
        budget = planner.device_budget if slot_floor is None else planner.budget
        return Rank(
            make_ledger=lambda: budget.split_for(lengths, slot_floor=slot_floor),
            slot_count=budget.split_for(lengths, slot_floor=slot_floor).free(SLOTS),
            slot_floor=slot_floor,
            window_floor=planner.layout.window_floor,
            times=self.times,
            missed=self.missed,
            depth=planner.ask.queries_each,
            target_ms=serving.objective.tpot_s * 1e3 if serving.is_paced else None,
            batch_max=serving.batch_max,
            chunk_max=serving.chunk_tokens,
            chunk_time=self.prefilling.time if serving.tier is None else None,
            positions_max=positions_max(max(lengths), on_device=True),
        )

    def missed(self, length: int, slots: float) -> float:
        """Misses from the curves, for the tokens that a step verifies."""
        queries = self.planner.ask.queries_each
        mean = self.planner.curves.mean(context=length, slots=slots)
        missed = self.misses_off * mean * queries / PUBLISHED_QUERIES
        return min(missed, float(queries * self.planner.layout.top_k))
