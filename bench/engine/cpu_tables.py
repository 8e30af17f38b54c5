"""Operator tables of the embedded model on this machine, and the step time they predict.

A few small runs are timed; the median time of every stage per step becomes a surface over queries
and context, read by the simulator's own interpolation. A step is then the sum of its stages: NONE
has no overlap. The predicted context and batch are not among the runs; most often the context is
beyond them: stages are linear in the context, as the number of keys is.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ess.bench.engine.arms.decode_arm import DecodeArm, DecodeWay, DecodeWork
from ess.bench.harness.measure.slow_lane import TimedLane
from ess.bench.harness.measure.spans import step_spans
from ess.bench.harness.prefix import Prefix
from ess.clock import Clock
from ess.errors import BadInput
from ess.flashtrans.lanes import open_lane
from ess.sim.operators.tables import Curve, Surface
from ess.sim.timeline import COMPUTE, Span

STEPS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTables:
    """Microseconds of each stage in a whole step, by queries and context."""

    stages: Mapping[str, Surface]

    def step_us(self, *, queries: int, context: int) -> float:
        return sum(max(0.0, surface.at(queries, context)) for surface in self.stages.values())


class Watched:
    """An engine that returns the spans of each step. With a clock other than the wall's it leaves
    out jobs of the copy lane, whose times are the wall clock's."""

    def __init__(
        self, prefix: Prefix, shape: DecodeWork, way: DecodeWay, *, clock: Clock | None = None
    ) -> None:
        self._lane = TimedLane(below=open_lane())
        self.arm = DecodeArm(prefix, shape, way, lane=self._lane)
        self._timeline = self.arm.engine.tuning.timeline
        self._timeline.keeps_spans = True
        self._is_wall = clock is None
        self._timeline.clock = clock or self._timeline.clock
        self.arm.offload.drain()

    def step(self) -> list[Span]:
        self._lane.take_jobs()
        begin_ns = self._timeline.clock.now_ns()
        self.arm.step()
        end_ns = self._timeline.clock.now_ns()
        self.arm.offload.drain()
        layers = self.arm.offload.layout.layer_count
        stages, jobs = self._timeline.spans, self._lane.take_jobs() if self._is_wall else []
        return step_spans(stages, jobs, layers=layers, begin_ns=begin_ns, end_ns=end_ns)


def calibrate(
    prefix: Prefix,
    *,
    contexts: Sequence[int],
    batches: Sequence[int],
    mtp: int,
    way: DecodeWay,
    steps: int = STEPS,
) -> CpuTables:
    if len(set(contexts)) < 2 or len(set(batches)) < 2:
        raise BadInput(
            f"contexts {contexts}, batches {batches}: a surface needs at least two of each"
        )
    points_of: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for context in sorted(contexts):
        for batch in sorted(batches):
            shape = DecodeWork(context=context, batch=batch, mtp=mtp, steps=steps + 1)
            for stage, us in stage_medians(prefix, shape, way, steps).items():
                points_of[stage][context].append((float(batch * mtp), us))
    return CpuTables(stages={stage: _surface(points) for stage, points in points_of.items()})


def stage_medians(
    prefix: Prefix, shape: DecodeWork, way: DecodeWay, steps: int
) -> dict[str, float]:
    """The median microseconds of each stage per step; the first step does not count."""
    watched = Watched(prefix, shape, way)
    try:
        watched.step()
        totals = [stage_totals(watched.step()) for _ in range(steps)]
    finally:
        watched.arm.close()
    return {
        stage: statistics.median(step_us.get(stage, 0.0) for step_us in totals)
        for stage in set().union(*totals)
    }


def stage_totals(spans: Sequence[Span]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for span in spans:
        if span.lane == COMPUTE:
            totals[span.name] += span.end_us - span.start_us
    return totals


def _surface(points: Mapping[int, list[tuple[float, float]]]) -> Surface:
    curves = [Curve(*zip(*points[context], strict=True)) for context in sorted(points)]
    return Surface(tuple(float(context) for context in sorted(points)), tuple(curves))
