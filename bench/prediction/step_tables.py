"""Times of this machine's steps, and the prediction of a step that was not timed.

A stage is a curve over the context, for one batch and number of drafts. It was timed at one ratio
of slots, so with a given number of misses: the stages that plan and wait take `miss_us` more for
each further miss. A prompt chunk runs after the decode stages of its step, so its time is added; it
is a surface over the tokens before it and its own.

Time is the processor time of the engine, its copy lane included. On a busy machine the wall clock
also counts the wait for a core, which no table knows: a step of 5 ms was timed at 17 to 47. With
one compute thread, and only the stores running beside it in NONE, the two clocks agree on an idle
machine. Other programs still affect caches and clock rates: these change within minutes, so engines
that are compared are opened in turns.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from ess import console
from ess.bench.engine.arms.decode_arm import DecodeWay, DecodeWork
from ess.bench.engine.cpu_tables import Watched, stage_totals
from ess.bench.harness.prefix import Prefix
from ess.bench.prediction.grid import VISITS, Cell
from ess.clock import Clock
from ess.sim.operators.tables import Curve, Surface

FETCHING: Final = ("plan", "wait")
FASTEST: Final = 3


class ProcessorClock(Clock):
    """The processor time of all threads of this process."""

    def now_s(self) -> float:
        return time.process_time()

    now_ns = staticmethod(time.process_time_ns)


class TimedStep(NamedTuple):
    """A step, or the mean of several: microseconds by stage, and rows missed in all groups."""

    stages: Mapping[str, float]
    misses: float

    @property
    def us(self) -> float:
        return sum(self.stages.values())

    @property
    def fetching_us(self) -> float:
        return sum(self.stages.get(stage, 0.0) for stage in FETCHING)


Visit = Callable[[Cell, int], list[TimedStep]]
"""Runs this many steps of a cell, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTables:
    """`misses` is how many rows the timed steps missed."""

    stages: Mapping[str, Curve]
    misses: Curve
    miss_us: float

    def us(self, *, context: int, misses: float) -> float:
        stages_us = sum(max(0.0, stage.at(context)) for stage in self.stages.values())
        return stages_us + self.miss_us * (misses - self.misses.at(context))


def timed_in_turns(visit: Visit, cells: Iterable[Cell], *, steps: int) -> dict[Cell, TimedStep]:
    """Visits every cell in order, then in reverse, then in order again, so that a slow hour of the
    machine affects all of them, and one engine is open at a time.

    A visit runs `steps`; its first does not count, and of the others the fastest third of all
    visits does: what other programs leave in the processor's caches only makes a step slower."""
    ordered = list(cells)
    taken: dict[Cell, list[TimedStep]] = defaultdict(list)
    for turn in range(VISITS):
        for cell in reversed(ordered) if turn % 2 else ordered:
            taken[cell] += visit(cell, steps)[1:]
    return {cell: _mean(sorted(each, key=lambda step: step.us)) for cell, each in taken.items()}


def visited(prefix: Prefix, cell: Cell, steps: int) -> list[TimedStep]:
    """Times steps of a cell, in NONE, with an engine opened for them."""
    console.note(str(cell))
    shape = DecodeWork(
        context=cell.context, batch=cell.batch, mtp=cell.mtp, steps=steps, chunk=cell.chunk
    )
    way = DecodeWay(name=str(cell), mode="none", ratio=cell.ratio)
    watched = Watched(prefix, shape, way, clock=ProcessorClock())
    with contextlib.closing(watched.arm):
        totals = [stage_totals(watched.step()) for _ in range(steps)]
        misses = [float(missed.sum()) for missed in watched.arm.taken.misses]
    del watched
    gc.collect()  # reference circles keep an engine alive, with up to 3 GB
    return [TimedStep(*each) for each in zip(totals, misses, strict=True)]


def _mean(steps: list[TimedStep]) -> TimedStep:
    fastest = steps[: max(1, len(steps) // FASTEST)]
    return TimedStep(
        stages={
            stage: statistics.mean(step.stages.get(stage, 0.0) for step in fastest)
            for stage in set().union(*(step.stages for step in fastest))
        },
        misses=statistics.mean(step.misses for step in fastest),
    )


def step_tables(steps: Mapping[int, TimedStep], *, miss_us: float) -> StepTables:
    """Tables from timed steps by context."""
    contexts = sorted(steps)
    sizes = tuple(map(float, contexts))
    return StepTables(
        stages={
            stage: Curve(sizes, tuple(steps[each].stages.get(stage, 0.0) for each in contexts))
            for stage in set().union(*(step.stages for step in steps.values()))
        },
        misses=Curve(sizes, tuple(steps[context].misses for context in contexts)),
        miss_us=miss_us,
    )


def miss_us(few: TimedStep, many: TimedStep) -> float:
    """The time of one miss, from two steps of the same shape at two ratios."""
    further = many.misses - few.misses
    return max(0.0, many.fetching_us - few.fetching_us) / further if further > 0 else 0.0


def chunk_surface(chunks: Mapping[tuple[int, int], float]) -> Surface:
    """Microseconds over the tokens before a chunk and its own, in this order."""
    curves: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (before, tokens), us in sorted(chunks.items()):
        curves[tokens].append((float(before), us))
    sizes = sorted(curves)
    return Surface(
        tuple(map(float, sizes)),
        tuple(Curve(*zip(*curves[tokens], strict=True)) for tokens in sizes),
    )
