"""The fewest GPUs, over all sizes of a decode group and all ways to share a model in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from ess.errors import BadInput
from ess.sim.operators.parallel import Parallel
from ess.sim.planning.batches import Point
from ess.sim.planning.deployment import Prefilling, Work
from ess.sim.planning.fleet import Fleet, Wanted, fewest
from ess.sim.planning.node import Node
from ess.sim.planning.planner import Planner
from ess.sim.planning.prefilling import least_gpus, through
from ess.sim.planning.ways import GROUPS, ways

QuickPoint = Callable[[Planner], Point | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """A fleet, the batch that its decode groups run, and how their GPUs share the model."""

    fleet: Fleet
    point: Point
    parallel: Parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleets:
    """`resident` is None where no way without offload meets the objectives."""

    offload: Deployed
    resident: Deployed | None


def fleets(
    planner: Planner, *, prefilling: Prefilling, node: Node, work: Work, wanted: Wanted
) -> Fleets:
    wanted = replace(wanted, prefill_gpus_min=least_gpus(planner))
    passing = partial(through, planner, prefilling, node, work)

    def smallest(point_of: QuickPoint) -> Deployed | None:
        deployed = [
            Deployed(fleet=fleet, point=point, parallel=sized.ask.way)
            for sized in _sizes(planner)
            if (point := _point(point_of, sized)) is not None
            for fleet in [
                fewest(point, sized.ask.gpu_count, work=work, wanted=wanted, through=passing)
            ]
        ]
        return min(deployed, key=lambda each: each.fleet.gpu_count, default=None)

    offload = smallest(lambda sized: sized.quick(sized.least_slots))
    if offload is None:
        raise BadInput(_too_small(planner))
    return Fleets(offload=offload, resident=smallest(lambda sized: sized.quick(sized.ask.context)))


def _too_small(planner: Planner) -> str:
    ask = planner.ask
    sizes = f"{min(GROUPS[0], ask.gpu_count)} to {max(GROUPS[-1], ask.gpu_count)} GPUs"
    where = f"no decode group of {sizes} at {ask.context:,} tokens"
    if ask.token_us_max is None:
        return f"{where} has memory for a request"
    return f"{where} makes a token within {ask.token_us_max / 1e3:.1f} ms"


def _sizes(planner: Planner) -> Iterable[Planner]:
    """Host memory grows with the GPUs."""
    ask = planner.ask
    for gpus in dict.fromkeys([ask.gpu_count, *GROUPS]):
        host = None if ask.host_bytes is None else ask.host_bytes * gpus // ask.gpu_count
        for way in ways(gpus):
            if way.pp == 1 and way.attention_tp in (1, 8):
                sized = replace(ask, gpu_count=gpus, parallel=way, host_bytes=host)
                yield replace(planner, ask=sized, baseline=None)


def _point(point_of: QuickPoint, sized: Planner) -> Point | None:
    """None where memory or operators refuse this way."""
    try:
        return point_of(sized)
    except BadInput:
        return None
