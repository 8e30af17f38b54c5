"""Which schedule each layer runs: chosen from live counters, changed only when it clearly pays.

A change of vector costs a captured graph, so it must be worth it and must last. `advance` is pure:
state and an observation in, state out; the same observations give the same vectors on every rank.
A vector gives way when the best vector has been predicted at least `WIN` cheaper for `PATIENCE`
steps in a row; which vector is best may shift meanwhile (a layer on the edge between two
schedules), the latest is taken. Misses, link rate and windows are exponential averages, so a
single odd step neither starts a change nor stops one.

RESIDENT is not weighed: it is right exactly when the ledger knows that every row of the batch is
resident, and wrong otherwise; so it follows the ledger and leaves the state alone.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ess.cost import Exposed, Hiding, exposed, transfer_us
from ess.errors import BadInput

WIN: Final = 0.05
PATIENCE: Final = 64
WEIGHT: Final = 1 / 16


class Mode(enum.IntEnum):
    """How a layer runs. Among equals the earlier one is simpler and is taken."""

    RESIDENT = 0
    NONE = 1
    DA = 2
    DBA = 3


Vector = tuple[Mode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Counters of a step, or the mean over `step_count` steps. Misses are per request and layer;
    None where nothing was measured.

    `hiding` is measured over the layers of a step: all of them share a pair of windows.
    """

    misses: tuple[float, ...]
    request_count: int
    bytes_per_us: float | None = None
    hiding: Hiding | None = None
    step_count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """Averages that live counters move, the vector in force, and how long another has won."""

    row_bytes: int
    misses: tuple[float, ...]
    bytes_per_us: float
    hiding: Hiding
    vector: Vector
    lead_count: int = 0

    def __post_init__(self) -> None:
        if len(self.misses) != len(self.vector) or not self.misses:
            counts = f"{len(self.misses)} miss rates, {len(self.vector)} modes"
            raise BadInput(f"a policy needs a miss rate and a mode for each layer, got {counts}")
        assert self.row_bytes > 0, f"rows of {self.row_bytes} bytes"
        assert 0 <= self.lead_count < PATIENCE, f"a lead of {self.lead_count} steps was not taken"


def start(
    *,
    misses: Sequence[float],
    request_count: int,
    row_bytes: int,
    bytes_per_us: float,
    hiding: Hiding,
) -> PolicyState:
    """The state after calibration: expected misses, link rate, windows, and their best vector."""
    _check_rate(bytes_per_us)
    _check_counts(misses, request_count)
    first = PolicyState(
        row_bytes=row_bytes,
        misses=tuple(misses),
        bytes_per_us=bytes_per_us,
        hiding=hiding,
        vector=(Mode.NONE,) * len(misses),
    )
    return replace(first, vector=best_vector(layer_costs(first, request_count)))


def layer_costs(state: PolicyState, request_count: int) -> tuple[Exposed, ...]:
    moved = (
        transfer_us(
            miss_count=miss_count,
            request_count=request_count,
            row_bytes=state.row_bytes,
            bytes_per_us=state.bytes_per_us,
        )
        for miss_count in state.misses
    )
    costs = tuple(exposed(moved_us, state.hiding) for moved_us in moved)
    assert len(costs) == len(state.vector), f"{len(costs)} costs, {len(state.vector)} layers"
    return costs


def best_mode(cost: Exposed) -> Mode:
    """The cheapest schedule, the simplest among equals.

    >>> best_mode(Exposed(none=20.0, da=30.0, dba=36.0)).name
    'NONE'
    """
    assert all(us >= 0 for us in cost), f"negative exposure {cost}"
    return min((Mode.NONE, Mode.DA, Mode.DBA), key=lambda mode: exposed_us(cost, mode))


def best_vector(costs: Sequence[Exposed]) -> Vector:
    best = tuple(best_mode(cost) for cost in costs)
    assert Mode.RESIDENT not in best, "RESIDENT follows the ledger, it is never chosen"
    return best


def exposed_us(cost: Exposed, mode: Mode) -> float:
    match mode:
        case Mode.RESIDENT:
            return 0.0
        case Mode.NONE:
            return cost.none
        case Mode.DA:
            return cost.da
        case Mode.DBA:
            return cost.dba


def vector_us(costs: Sequence[Exposed], vector: Vector) -> float:
    assert len(costs) == len(vector), f"{len(costs)} layers, {len(vector)} modes"
    return math.fsum(exposed_us(cost, mode) for cost, mode in zip(costs, vector, strict=True))


def advance(state: PolicyState, seen: Observation) -> PolicyState:
    """The state after one more observation; the vector changes when another has won for long."""
    assert seen.step_count > 0, f"an observation of {seen.step_count} steps"
    if len(seen.misses) != len(state.misses):
        raise BadInput(f"misses of {len(seen.misses)} layers, the policy has {len(state.misses)}")
    _check_counts(seen.misses, seen.request_count)
    if seen.bytes_per_us is not None:
        _check_rate(seen.bytes_per_us)
    weight = 1 - (1 - WEIGHT) ** seen.step_count
    follow = functools.partial(_follow, weight=weight)
    followed = replace(
        state,
        misses=tuple(map(follow, state.misses, seen.misses)),
        bytes_per_us=follow(state.bytes_per_us, seen.bytes_per_us or state.bytes_per_us),
        hiding=_follow_hiding(state.hiding, seen.hiding or state.hiding, weight),
    )
    costs = layer_costs(followed, seen.request_count)
    best = best_vector(costs)
    assert vector_us(costs, best) <= vector_us(costs, state.vector), "the best is not the cheapest"
    wins = vector_us(costs, best) < (1 - WIN) * vector_us(costs, state.vector)
    lead_count = state.lead_count + seen.step_count if wins else 0
    if lead_count >= PATIENCE:
        return replace(followed, vector=best, lead_count=0)
    return replace(followed, lead_count=lead_count)


def modes(state: PolicyState, *, all_resident: bool) -> Vector:
    """The modes that this step runs, by layer."""
    assert Mode.RESIDENT not in state.vector, "RESIDENT was kept after the ledger's word"
    return (Mode.RESIDENT,) * len(state.vector) if all_resident else state.vector


def _check_counts(misses: Sequence[float], request_count: int) -> None:
    wrong = [miss for miss in misses if not (miss >= 0 and math.isfinite(miss))]
    if wrong:
        raise BadInput(f"a layer misses {wrong[0]} rows a request; counts are finite, 0 or more")
    if request_count < 0:
        raise BadInput(f"a step of {request_count} requests; counts are 0 or more")


def _check_rate(bytes_per_us: float) -> None:
    if not (bytes_per_us > 0 and math.isfinite(bytes_per_us)):
        raise BadInput(f"a link of {bytes_per_us} bytes per microsecond; rates are above 0")


def _follow(average: float, value: float, *, weight: float) -> float:
    assert math.isfinite(average), f"an average became {average}"
    return average + weight * (value - average)


def _follow_hiding(average: Hiding, value: Hiding, weight: float) -> Hiding:
    return Hiding(
        window_us=_follow(average.window_us, value.window_us, weight=weight),
        index_us=_follow(average.index_us, value.index_us, weight=weight),
        da_cost_us=_follow(average.da_cost_us, value.da_cost_us, weight=weight),
        dba_cost_us=_follow(average.dba_cost_us, value.dba_cost_us, weight=weight),
        ahead_us=_follow(average.ahead_us, value.ahead_us, weight=weight),
    )
