"""The fewest GPUs for a rate of requests and two objectives: both tiers in whole groups, prefill in
whole pipelines too.

Decode: a group that runs at its best batch within the time per token ends a number of requests a
second. Arrivals are uneven, so it gets at most `LOAD_MAX` of that; so does prefill.

Prefill: requests arrive at random (Poisson), each keeps a pipeline busy for as long as its busiest
stage works on it, and c pipelines share one queue (M/D/c). With Erlang's share C of requests that
wait at all, and a load of a = rate x busy seconds, nine in ten wait no longer than

    W = busy / 2 / (c - a) * ln(10 C)

half of the value for random service times, since here all are equal. The time to the first token is
this wait, the time through the pipeline, the handoff and the first step. It is an estimate of the
queue; `ess sim` replays it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ess.errors import BadInput
from ess.sim.planning.batches import Point
from ess.sim.planning.deployment import Work
from ess.units import align_up, counted

LOAD_MAX: Final = 0.9
LATE_SHARE: Final = 0.1
STAGES: Final = (1, 2, 4, 8, 16)
PIPELINES_SPARE: Final = 1 << 10
PIPELINES_MAX: Final = 1 << 14
RATE_MAX: Final = 1e6

Through = Callable[[int], tuple[float, float]]
"""By the stages of a pipeline: how long a request occupies it, and how long until it may decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetGoal:
    """Requests a second, and seconds to the first token for nine in ten."""

    rate: float
    ttft_s: float

    def __post_init__(self) -> None:
        if not 0.0 < self.rate <= RATE_MAX:
            raise BadInput(f"a rate of {self.rate:g} requests a second is outside 0..{RATE_MAX:g}")
        if not 0.0 < self.ttft_s < math.inf:
            raise BadInput(f"a time to the first token of {self.ttft_s:g} s must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Equal groups of GPUs for decode, or pipelines for prefill; `load` is the used share of their
    capacity."""

    count: int
    gpus_each: int
    load: float

    @property
    def gpu_count(self) -> int:
        return self.count * self.gpus_each


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTier(Groups):
    first_token_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    decode: Groups
    prefill: PrefillTier
    token_us: float

    @property
    def gpu_count(self) -> int:
        return self.decode.gpu_count + self.prefill.gpu_count


def fewest(
    point: Point,
    group_gpus: int,
    *,
    work: Work,
    wanted: FleetGoal,
    through: Through,
    prefill_group: int = 1,
) -> Fleet:
    """The fewest GPUs, with decode groups that run this batch."""
    group_rate = point.tokens_per_s * group_gpus / work.output_tokens
    groups = math.ceil(wanted.rate / (LOAD_MAX * group_rate))
    return Fleet(
        decode=Groups(count=groups, gpus_each=group_gpus, load=wanted.rate / (groups * group_rate)),
        prefill=smallest_tier(
            wanted, through, first_step_s=point.step_us / 1e6, group=prefill_group
        ),
        token_us=point.token_us,
    )


def smallest_tier(
    wanted: FleetGoal, through: Through, *, first_step_s: float, group: int = 1
) -> PrefillTier:
    """The prefill tier with the fewest GPUs, and among equals the earliest first token. `group`
    GPUs share the experts: a tier has whole groups of them."""
    tiers = [
        tier
        for count in STAGES
        if (tier := _tier(wanted, count, *through(count), first_step_s, group)) is not None
    ]
    if not tiers:
        soonest = min(through(count)[1] for count in STAGES) + first_step_s
        raise BadInput(
            f"a first token within {wanted.ttft_s:g} s is out of reach: an idle pipeline of up to "
            f"{max(STAGES)} GPUs takes {soonest:.1f} s"
        )
    return min(tiers, key=lambda tier: (tier.gpu_count, tier.first_token_s))


def _tier(
    wanted: FleetGoal,
    stages: int,
    busy_s: float,
    ready_s: float,
    first_step_s: float,
    group: int,
) -> PrefillTier | None:
    """The smallest tier with this many stages, in as many pipelines as fill whole groups; None if
    even an idle pipeline is too late."""
    spare_s = wanted.ttft_s - ready_s - first_step_s
    if spare_s < 0.0:
        return None
    load = wanted.rate * busy_s
    least = max(1, math.ceil(load / LOAD_MAX))
    most = least + PIPELINES_SPARE
    if most > PIPELINES_MAX:
        raise BadInput(
            f"{wanted.rate:,g} requests a second keep {load:,.0f} pipelines of "
            f"{counted(stages, 'GPU')} busy; at most {PIPELINES_MAX - PIPELINES_SPARE:,} can be "
            "planned"
        )
    enough = bisect_left(
        range(most), True, lo=least, key=lambda count: late_wait_s(count, load, busy_s) <= spare_s
    )
    to_fill = group // math.gcd(group, stages)
    pipelines = align_up(enough, to_fill)
    return PrefillTier(
        count=pipelines,
        gpus_each=stages,
        load=load / pipelines,
        first_token_s=late_wait_s(pipelines, load, busy_s) + ready_s + first_step_s,
    )


def first_token_s(
    tier: Groups, wanted: FleetGoal, through: Through, *, first_step_s: float
) -> float:
    """Seconds to the first token for nine in ten; infinite if the tier gets more than it can do."""
    busy_s, ready_s = through(tier.gpus_each)
    load = wanted.rate * busy_s
    if load >= tier.count:
        return math.inf
    return late_wait_s(tier.count, load, busy_s) + ready_s + first_step_s


def late_wait_s(pipelines: int, load: float, busy_s: float) -> float:
    """The longest wait of nine in ten requests.

    >>> late_wait_s(4, 0.5, 1.0)
    0.0
    """
    if busy_s == 0.0:
        return 0.0
    late = erlang_c(pipelines, load) / LATE_SHARE
    return 0.0 if late <= 1.0 else busy_s / 2 / (pipelines - load) * math.log(late)


def erlang_c(servers: int, load: float) -> float:
    """The share of Poisson arrivals that wait, at `servers` servers with a load below them.

    >>> round(erlang_c(1, 0.5), 6), round(erlang_c(2, 1.0), 6)
    (0.5, 0.333333)
    """
    assert 0.0 <= load < servers, f"a load of {load} on {servers}"
    blocked = 1.0
    for busy in range(1, servers + 1):
        blocked = load * blocked / (busy + load * blocked)
    return blocked / (1.0 - load / servers * (1.0 - blocked))
