"""The ways of sharing a model over GPUs that are tried, and the best with and without offload.

Every way is judged by a quick guess at its best batch in time; the best way is then planned in
full. A way must be better than a plainer one by `CLEARLY`: less is within the error of the guess.
The best ways with and without offload may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final

from ess.errors import BadInput
from ess.sim.operators.parallel import Parallel
from ess.sim.planning.batches import Point
from ess.sim.planning.planner import Planner

CLEARLY: Final = 1.05
ATTENTION_TP: Final = (1, 2, 4, 8)
STAGES: Final = (1, 2)
GROUPS: Final = (8, 16, 32, 64, 128, 256)
"""Numbers of GPUs sharing a model for which exchange and experts were measured."""


def ways(gpu_count: int) -> Iterator[Parallel]:
    """First requests and experts over all GPUs; then heads over up to a node, two stages, and on
    one node experts in parts."""
    for pp in STAGES:
        stage, rest = divmod(gpu_count, pp)
        for tp in ATTENTION_TP:
            if rest or stage % tp:
                continue
            groups = stage // tp
            yield Parallel(attention_tp=tp, attention_dp=groups, expert_ep=stage, pp=pp)
            if groups == 1 < tp:
                yield Parallel(attention_tp=tp, expert_tp=tp, pp=pp)


def best_way(planner: Planner) -> Planner:
    """The planner with the best way, and with the resident side's best way as its baseline. If
    nothing fits in any way, the planner unchanged, which then says why."""
    tried = [
        replace(planner, ask=replace(planner.ask, gpu_count=way.gpu_count, parallel=way))
        for way in ways(planner.ask.gpu_count)
    ]
    chosen = _best(tried, lambda each: each.quick(each.least_slots)) or planner
    baseline = _best(tried, lambda each: each.quick(each.ask.context))
    return replace(chosen, baseline=baseline)


def _best(tried: Iterable[Planner], point_of: Callable[[Planner], Point | None]) -> Planner | None:
    """The best planner; None if no way has a point, as when operators or memory refuse all. Earlier
    ways are plainer."""
    rated = []
    for planner in tried:
        try:
            point = point_of(planner)
        except BadInput:
            continue
        if point is not None:
            rated.append((point.tokens_per_s, planner))
    if not rated:
        return None
    most = max(rate for rate, _ in rated)
    return next(planner for rate, planner in rated if CLEARLY * rate >= most)
