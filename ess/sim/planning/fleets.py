"""The fewest GPUs, over all sizes of a decode group and all ways to share a model in it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ess.errors import BadInput
from ess.sim.operators.parallel import Parallel
from ess.sim.planning.bands import Band, at_ends, moved
from ess.sim.planning.batches import Point
from ess.sim.planning.deployment import Prefilling, Work
from ess.sim.planning.fleet import Fleet, FleetGoal, Through, fewest, first_token_s
from ess.sim.planning.node import Node
from ess.sim.planning.planner import Planner
from ess.sim.planning.prefilling import GROUPS as PREFILL_GROUPS
from ess.sim.planning.prefilling import least_group, prefilling_in, through
from ess.sim.planning.ways import GROUPS, ways

QuickPoint = Callable[[Planner], Point | None]
Ends = tuple[float, float | None]
"""The least and the most that a figure may be; None means no end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedFleet:
    """A fleet, the batch that its decode groups run, and how their GPUs share the model.

    `gpu_ends` are the GPUs needed if times are off by their bands, `first_token_ends_s` what such
    times make of the first token in the fleet as it is. `prefill_band` is that of the prefill
    tier's load, whose GPUs prefill in groups of `prefill_group`; decode's is the point's
    `token_band`. `marks` are those of prefill.
    """

    fleet: Fleet
    point: Point
    parallel: Parallel
    prefill_group: int
    prefill_band: Band
    marks: tuple[str, ...]
    gpu_ends: Ends
    first_token_ends_s: Ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleets:
    """`resident` is None if no way without offload meets the objectives."""

    offload: DeployedFleet
    resident: DeployedFleet | None


def fleets(
    planner: Planner, *, prefilling: Prefilling, node: Node, work: Work, wanted: FleetGoal
) -> Fleets:
    """Whole groups of the fastest size that prefills may have GPUs to spare, so smaller groups that
    hold the weights are tried too."""
    least = least_group(planner)
    smaller = [
        gpus for gpus in sorted({least, *PREFILL_GROUPS}) if least <= gpus < prefilling.group_gpus
    ]
    some = [prefilling, *(prefilling_in(planner, gpus) for gpus in smaller)]
    searches = [
        Search(
            work=work,
            wanted=wanted,
            through=partial(through, planner, each, node, work),
            prefilling=each,
        )
        for each in some
    ]
    sizes = list(_sizes(planner))
    offload = _smallest(searches, sizes, lambda sized: sized.quick(sized.least_slots))
    if offload is None:
        raise BadInput(_too_small(planner))
    try:
        resident = _smallest(searches, sizes, lambda sized: sized.quick(sized.ask.context))
    except BadInput:  # too late for the objectives at every size; offload meets them
        resident = None
    return Fleets(offload=offload, resident=resident)


def _smallest(
    searches: Iterable[Search], sizes: Sequence[Planner], point_of: QuickPoint
) -> DeployedFleet | None:
    """The smallest fleet; a refusal only if every search refuses every size."""
    points = [(sized, point) for sized in sizes if (point := _point(point_of, sized)) is not None]
    fleets: list[tuple[Fleet, Search, Planner, Point]] = []
    refusals: list[BadInput] = []
    for search, (sized, point) in itertools.product(searches, points):
        try:
            fleets.append((search.fleet(sized, point), search, sized, point))
        except BadInput as refusal:
            refusals.append(refusal)
    if not fleets and refusals:
        raise refusals[0]
    if not fleets:
        return None
    fleet, search, sized, point = min(fleets, key=lambda each: each[0].gpu_count)
    return search.deployed(fleet, sized, sized.banded(point), point_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The goal of a fleet. `token` and `prefill` are factors on predicted times."""

    work: Work
    wanted: FleetGoal
    through: Through
    prefilling: Prefilling

    def deployed(
        self, fleet: Fleet, sized: Planner, point: Point, point_of: QuickPoint
    ) -> DeployedFleet:
        def gpu_count(token: float, prefill: float) -> float:
            timed = point if token == 1.0 else _point(point_of, sized.timed(token))
            if timed is None:
                return math.inf
            try:
                return self.fleet(sized, timed, token=token, prefill=prefill).gpu_count
            except BadInput:
                return math.inf

        def first_s(token: float, prefill: float) -> float:
            slower = self._slower(prefill)
            first_step_s = token * point.step_us / 1e6
            return first_token_s(fleet.prefill, self.wanted, slower, first_step_s=first_step_s)

        off = {"token": point.token_band, "prefill": self.prefilling.band}
        low, high = at_ends(fleet.gpu_count, moved(gpu_count, **off))
        first, last = at_ends(fleet.prefill.first_token_s, moved(first_s, **off))
        return DeployedFleet(
            fleet=fleet,
            point=point,
            parallel=sized.ask.way,
            prefill_group=self.prefilling.group_gpus,
            prefill_band=self.prefilling.band,
            marks=self.prefilling.marks,
            gpu_ends=(math.floor(low), math.ceil(high) if high < math.inf else None),
            first_token_ends_s=(first, last if last < math.inf else None),
        )

    def fleet(
        self, sized: Planner, point: Point, *, token: float = 1.0, prefill: float = 1.0
    ) -> Fleet:
        return fewest(
            replace(
                point,
                step_us=token * point.step_us,
                token_us=token * point.token_us,
                tokens_per_s=point.tokens_per_s / token,
            ),
            sized.ask.gpu_count,
            work=self.work,
            wanted=self.wanted,
            through=self._slower(prefill),
            prefill_group=self.prefilling.group_gpus,
        )

    def _slower(self, factor: float) -> Through:
        def passing(stages: int) -> tuple[float, float]:
            busy_s, ready_s = self.through(stages)
            return factor * busy_s, factor * ready_s

        return passing


def _too_small(planner: Planner) -> str:
    ask = planner.ask
    sizes = f"{min(GROUPS[0], ask.gpu_count)} to {max(GROUPS[-1], ask.gpu_count)} GPUs"
    where = f"no decode group of {sizes} at {ask.context:,} tokens"
    if ask.token_us_max is None:
        return f"{where} has memory for a request"
    return f"{where} makes a token within {ask.token_us_max / 1e3:.1f} ms"


def _sizes(planner: Planner) -> Iterable[Planner]:
    """Planners for each size of a group, a whole rack's too; host memory grows with the GPUs."""
    ask, linked = planner.ask, planner.operators.machine.linked_gpus
    for gpus in dict.fromkeys([ask.gpu_count, *GROUPS, linked]):
        host = None if ask.host_bytes is None else ask.host_bytes * gpus // ask.gpu_count
        for way in ways(gpus):
            if way.pp == 1 and way.attention_tp in (1, 8):
                sized = replace(ask, gpu_count=gpus, parallel=way, host_bytes=host)
                yield replace(planner, ask=sized, baseline=None)


def _point(point_of: QuickPoint, sized: Planner) -> Point | None:
    """The point; None if memory or operators refuse this way."""
    try:
        return point_of(sized)
    except BadInput:
        return None
