"""The cost of a plan: native against its specification, and by context and arena size.

Each request keeps a pool of positions that it selects from, drawn over its whole context, and a few
of them are replaced by new positions every step. So the misses per step are set, the rows are
scattered, and the time to draw a selection does not depend on the context. Arenas are full before
timing starts. Arms that plan the same stream must return the same claims. The baseline of contexts
is 128k, where every selected row has its own cache line of the map; at 32k several share one.

Times are of the calling thread: planning never waits, and on a busy machine the wall clock charges
the slower arm for other programs' time, which makes the native arm look better than it is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ess.array_types import Ints
from ess.bench.harness.measure.timing import Arm, Samples, measure
from ess.bench.harness.report import Row, compare
from ess.kernels.cpu import native
from ess.pool.lru import planner, specification
from ess.pool.lru.arena import BLOCK_SLOTS, Arena, FetchPlan, Split

REPEATS: Final = 31
WARM_STEPS: Final = 40
SPEEDUP_TARGET: Final = 15.0
FLAT_TARGET: Final = 0.67


@dataclass(frozen=True, kw_only=True)
class PlannerLoad:
    batch: int = 16
    query_count: int = 1
    top_k: int = 2048
    context: int = 131_072
    slot_count: int = 100_032
    kept_positions: int = 4000
    fresh_positions: int = 160

    def scaled_down(self) -> PlannerLoad:
        return PlannerLoad(
            batch=4,
            query_count=self.query_count,
            top_k=128,
            context=self.context // 16,
            slot_count=self.slot_count // 32 // BLOCK_SLOTS * BLOCK_SLOTS,
            kept_positions=250,
            fresh_positions=10,
        )


class Stream:
    """One layer group through its steps, planned by the native twin or by the specification."""

    def __init__(self, load: PlannerLoad, operations: Any, *, seed: int = 3) -> None:
        self._load, self._operations = load, operations
        self._rng = np.random.default_rng(seed)
        self._arena = Arena.alone(row_count=load.batch * load.context, slot_count=load.slot_count)
        self._split = Split.create(query_count=load.batch * load.query_count, top_k=load.top_k)
        self._kept = self._positions(load.kept_positions)
        self._step = 1
        self._claims: FetchPlan | None = None
        self.miss_counts: list[int] = []
        everything = self._rng.permutation(load.batch * load.context)[: load.slot_count]
        filled = planner.fill(self._arena, everything.astype(np.int32), step=1, ticket=1)
        planner.land(self._arena, filled.slots, ticket=1)
        for _ in range(WARM_STEPS):
            self.prepare()
            self._claims = self._plan(planner)

    def _positions(self, count: int) -> Ints:
        shape = (self._load.batch, count)
        positions: Ints = self._rng.integers(0, self._load.context, shape, dtype=np.int32)
        return positions

    def prepare(self) -> None:
        """Lands the last copy, moves the pools on, and draws the selection of a new step."""
        load = self._load
        if self._claims is not None:
            planner.land(self._arena, self._claims.slots, ticket=1)
        self._step += 1
        replaced = self._rng.permutation(load.kept_positions)[: load.fresh_positions]
        self._kept[:, replaced] = self._positions(load.fresh_positions)
        picks = [
            self._rng.permutation(load.kept_positions)[: load.top_k]
            for _ in range(load.query_count)
        ]
        selection = np.sort(self._kept[:, np.stack(picks)], axis=-1)
        selection += np.arange(load.batch, dtype=np.int32)[:, None, None] * load.context
        self._rows = np.ascontiguousarray(selection.reshape(-1, load.top_k))

    def run(self) -> list[Ints]:
        self._claims = self._plan(self._operations)
        self.miss_counts.append(self._claims.slots.size)
        return [self._claims.slots, self._claims.rows, self._split.slots]

    def _plan(self, operations: Any) -> FetchPlan:
        claims: FetchPlan = operations.plan(
            self._arena, self._rows, step=self._step, ticket=1, split=self._split
        )
        return claims


class Turns:
    """Several groups in turn, so that the map of each has left the caches before its next turn."""

    def __init__(self, streams: list[Stream]) -> None:
        self._streams = streams
        self._turn = 0

    def prepare(self) -> None:
        self._turn = (self._turn + 1) % len(self._streams)
        self._streams[self._turn].prepare()

    def run(self) -> list[Ints]:
        return self._streams[self._turn].run()


def planner_benchmark(*, smoke: bool) -> list[Row]:
    shrink = PlannerLoad.scaled_down if smoke else lambda load: load
    repeats = _repeats(smoke=smoke)
    rows = [
        _against_specification(
            shrink(PlannerLoad(query_count=query_count)), group_count, smoke=smoke
        )
        for query_count, group_count in ((1, 1), (2, 1), (1, 8))
    ]
    contexts = [shrink(PlannerLoad(context=context)) for context in (131_072, 32_768, 1_048_576)]
    rows += _sweep("context", contexts, repeats, target=None if smoke else FLAT_TARGET)
    small = PlannerLoad(batch=8, kept_positions=2500)
    sizes = [replace(small, slot_count=count) for count in (25_024, 100_032, 400_000)]
    rows += _sweep("slot_count", [shrink(load) for load in sizes], repeats, target=None)
    return [*rows, _release(shrink(PlannerLoad()), repeats)]


def _repeats(*, smoke: bool) -> int:
    return 9 if smoke else REPEATS


def _against_specification(load: PlannerLoad, group_count: int, *, smoke: bool) -> Row:
    sides = [
        [Stream(load, operations, seed=seed) for seed in range(group_count)]
        for operations in (planner, specification)
    ]
    turns = [Turns(streams) for streams in sides]
    ours, rival = measure(
        [
            Arm(name=name, run=side.run, prepare=side.prepare)
            for name, side in zip(("native", "specification"), turns, strict=True)
        ],
        repeats=_repeats(smoke=smoke),
        same_result=True,
        clock=time.thread_time,
    )
    config = _config(load, sides[0]) | {"group_count": group_count}
    return compare(
        name="plan, per group",
        unit="us",
        ours=ours.each(scale=1e6),
        baseline=("NumPy specification", rival.each(scale=1e6)),
        target=None if smoke else SPEEDUP_TARGET,
        config=config,
    )


def _sweep(
    field: str, loads: list[PlannerLoad], repeats: int, *, target: float | None
) -> list[Row]:
    """Compares each load with the first."""
    streams = [Stream(load, planner) for load in loads]
    samples = measure(
        [
            Arm(name=str(getattr(load, field)), run=stream.run, prepare=stream.prepare)
            for load, stream in zip(loads, streams, strict=True)
        ],
        repeats=repeats,
        clock=time.thread_time,
    )
    return [
        compare(
            name=f"plan by {field}",
            unit="us",
            ours=ours.each(scale=1e6),
            baseline=(f"{field} {samples[0].name}", samples[0].each(scale=1e6)),
            target=target,
            config=_config(load, [stream]),
        )
        for load, stream, ours in zip(loads, streams, samples, strict=True)
    ]


def _release(load: PlannerLoad, repeats: int) -> Row:
    """The end of a request: all its rows are dropped, and few of them are resident."""
    gone = np.arange(load.context, dtype=np.int32)
    resident = np.arange(0, load.context, max(1, load.context // load.top_k), dtype=np.int32)

    def arm(name: str, operations: Any) -> Arm:
        arena = Arena.alone(row_count=load.context, slot_count=load.slot_count)
        return Arm(
            name=name,
            run=lambda: operations.drop(arena, gone),
            prepare=lambda: planner.fill(arena, resident, step=1, ticket=1),
        )

    samples: list[Samples] = measure(
        [arm("native", planner), arm("specification", specification)],
        repeats=repeats,
        same_result=True,
        clock=time.thread_time,
    )
    ours, rival = samples
    return compare(
        name="release of one context",
        unit="us",
        ours=ours.each(scale=1e6),
        baseline=("NumPy specification", rival.each(scale=1e6)),
        config={"context": load.context, "resident_count": resident.size},
    )


def _config(load: PlannerLoad, streams: list[Stream]) -> dict[str, Any]:
    misses = [count for stream in streams for count in stream.miss_counts]
    return {
        "batch": load.batch,
        "query_count": load.query_count,
        "top_k": load.top_k,
        "context": load.context,
        "slot_count": load.slot_count,
        "misses_per_request": round(float(np.mean(misses)) / load.batch, 1),
        "isa": native.isa() if native.available() else "numpy",
    }
