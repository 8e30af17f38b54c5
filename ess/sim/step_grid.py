"""The time of a decode step for any batch: simulated on a grid, linear between its points.

A replay takes tens of thousands of steps, a simulated one takes ten milliseconds. So a corner of a
grid over requests, mean context and missed rows is simulated once, when a step first falls beside
it. At zero misses everything is resident and there is no offload in the step.

A corner runs whole or in two overlapped halves, whichever is faster, as in the planner.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from ess.sim.decode_step import Scenario, simulate
from ess.sim.locality.misses import MissCurves
from ess.sim.operators.parallel import Parallel
from ess.sim.operators.stages import Operators

REQUESTS: Final = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512)
CONTEXTS: Final = tuple(1 << power for power in range(11, 22))
MISSES: Final = (0, 32, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096)


class StepTime(NamedTuple):
    """`exposed_us` of `step_us` wait for the host link."""

    step_us: float
    exposed_us: float


class StepClock(Protocol):
    """What a replay needs: the time of a step. `misses` are per request and layer."""

    def at(self, *, requests: int, queries: int, context: float, misses: float) -> StepTime: ...


@dataclass(slots=True, kw_only=True)
class StepTimes:
    operators: Operators
    curves: MissCurves
    parallel: Parallel
    corners: dict[tuple[int, int, int, int], StepTime] = field(default_factory=dict)

    def at(self, *, requests: int, queries: int, context: float, misses: float) -> StepTime:
        sides = (
            _grid_neighbours(REQUESTS, requests),
            _grid_neighbours(CONTEXTS, context),
            _grid_neighbours(MISSES, misses),
        )
        step_us = exposed_us = 0.0
        for corner in itertools.product(*sides):
            weight = corner[0][1] * corner[1][1] * corner[2][1]
            time = self._corner(queries, *(size for size, _ in corner))
            step_us += weight * time.step_us
            exposed_us += weight * time.exposed_us
        return StepTime(step_us, exposed_us)

    def _corner(self, queries: int, requests: int, context: int, misses: int) -> StepTime:
        key = (queries, requests, context, misses)
        if key not in self.corners:
            self.corners[key] = min(self._simulate(*key, tbo=tbo) for tbo in (False, True))
        return self.corners[key]

    def _simulate(
        self, queries: int, requests: int, context: int, misses: int, *, tbo: bool
    ) -> StepTime:
        layers = self.curves.spread(misses, context=context, queries_each=queries)
        scenario = Scenario(
            batch=requests / self.parallel.attention_tp,
            queries_each=queries,
            context=context,
            tbo=tbo,
            parallel=self.parallel,
            misses=layers if misses else None,
        )
        prediction = simulate(self.operators, scenario)
        return StepTime(prediction.step_us, prediction.exposed_us)


def _grid_neighbours(sizes: Sequence[int], size: float) -> list[tuple[int, float]]:
    """The grid sizes around `size` with their weights. Beyond the grid the last two sizes are
    extrapolated, below it the first size is used: as in the operator tables."""
    if size <= sizes[0]:
        return [(sizes[0], 1.0)]
    right = min(bisect_right(sizes, size), len(sizes) - 1)
    low, high = sizes[right - 1], sizes[right]
    share = (size - low) / (high - low)
    return [(low, 1.0)] if share == 0.0 else [(low, 1.0 - share), (high, share)]
