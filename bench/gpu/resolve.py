"""What a plan costs on a device, with the misses of the paper in every step, each way to run it.

A request keeps 1,948 hot rows and takes 100 of a cycle of cold ones, long enough that exact LRU has
dropped them before they come round: so every step of every request misses 100 rows, and the rows
lie at random. One graph plans the whole cycle; new step numbers are written before each replay.

The way that `ResolveShape.of` chooses comes first; a ratio above one says that another is faster.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Final

import numpy as np

from ess.bench.gpu.rig import GpuRig, Row, row
from ess.errors import BadState, Unavailable
from ess.kernels.cuda.arrays import DeviceArray
from ess.kernels.cuda.driver import call
from ess.kernels.cuda.graphs import CudaGraph
from ess.pool.lru.arena import Arena, Split
from ess.pool.lru.cuda import Residency, now_of
from ess.pool.lru.cuda_records import (
    CLUSTER_BLOCKS,
    CLUSTER_BLOCKS_MAX,
    PHASE_THREADS,
    TOGETHER_THREADS,
    ResolveShape,
)

TOP_K: Final = 2048
MISSES: Final = 100
SLOTS: Final = 6400
CONTEXT_ROWS: Final = 32_768
LANDING_ROWS: Final = 6000
WANTED_US: Final = {1: 10.0, 160: 25.0}
WAYS: Final = {
    0: "a launch a phase",
    1: "one block",
    CLUSTER_BLOCKS: f"cluster of {CLUSTER_BLOCKS}",
    CLUSTER_BLOCKS_MAX: f"cluster of {CLUSTER_BLOCKS_MAX}",
}
ALONE_BATCH_MAX: Final = 16


class Cycle:
    """Selections of a whole cycle on the device, and the arena that they are planned over."""

    def __init__(self, rig: GpuRig, *, batch: int, queries: int, misses: int, scale: int) -> None:
        self.rig, self.misses = rig, batch * misses
        top_k, slots, context = TOP_K // scale, SLOTS // scale // 64 * 64, CONTEXT_ROWS // scale
        self.turns = max(4, (slots - top_k) // max(1, misses) + 8) if misses else 8
        arena = Arena.alone(row_count=batch * context, slot_count=batch * slots)
        names = ("slot_of", "row_of", "last_use", "ticket_of", "dirty", "blocks", "hit_age")
        there = {name: DeviceArray(rig.device, getattr(arena, name)) for name in names}
        self.arena = SimpleNamespace(**there)
        split = Split.create(query_count=batch * queries, top_k=top_k)
        lists = ("slots", "hit", "miss", "place", "hit_count", "miss_count", "place_count")
        self.split = {name: DeviceArray(rig.device, getattr(split, name)) for name in lists}
        self.shape = ResolveShape.of(
            query_max=batch * queries, top_k=top_k, block_max=batch * slots // 64
        )
        self.rows = DeviceArray(
            rig.device, selections(batch, queries, top_k, misses, context, self.turns)
        )
        self.nows = DeviceArray(rig.device, np.zeros((self.turns, 5), np.int32))
        self.step = 300

    def residency(self, shape: ResolveShape) -> Residency:
        device = self.rig.device
        return Residency(
            device, shape, self.arena, lambda n: DeviceArray(device, np.zeros(n, np.int32))
        )

    def queue(self, residency: Residency, turn: int) -> None:
        stream, now = self.rig.stream.handle, residency.now
        source = self.nows[turn : turn + 1].data_ptr()
        call("cuMemcpyDtoDAsync", now.data_ptr(), source, now.nbytes, stream)
        rows = self.rows[turn : turn + 1]
        rows.shape = rows.shape[1:]
        residency.plan(SimpleNamespace(**self.split), rows, stream=stream)
        claimed = residency.workspace["claimed_slots"]
        residency.land(claimed, stream=stream, count=residency.claimed_count)

    def renumber(self) -> None:
        self.nows.write([self.now(self.step + turn) for turn in range(self.turns)])
        self.step += self.turns

    def now(self, step: int) -> list[int]:
        return now_of(
            step=step,
            ticket=step,
            query_count=self.shape.query_max,
            block_count=self.shape.block_max,
        )

    def us(self, together: int) -> list[float]:
        """Of one plan and its landing; the arena is as the way measured before has left it."""
        threads = TOGETHER_THREADS if together else PHASE_THREADS
        residency = self.residency(replace(self.shape, together=together, threads=threads))
        graph = CudaGraph(self.rig.device)
        with graph.capture(self.rig.stream.handle):
            for turn in range(self.turns):
                self.queue(residency, turn)
        taken = self.rig.us(lambda: graph.launch(self.rig.stream.handle), self.renumber)
        claimed = residency.report()["claimed"]
        assert claimed == self.misses, f"{claimed} rows claimed, {self.misses} expected"
        return [us / self.turns for us in taken]

    def landing_us(self, row_count: int) -> list[float]:
        """Of rows that have just left: they warm and land among the rows of the batch."""
        device, stream = self.rig.device, self.rig.stream.handle
        residency = self.residency(replace(self.shape, together=0, threads=PHASE_THREADS))
        order = np.random.default_rng(0).permutation(row_count)
        rows = DeviceArray(device, order.astype(np.int32))
        ages = DeviceArray(device, np.ones(row_count, np.int32))
        residency.now.write(self.now(self.step + 400))

        def land() -> None:
            residency.warm(rows, ages, stream=stream)
            slots = residency.workspace["claimed_slots"]
            residency.land(slots, stream=stream, count=residency.claimed_count)

        taken = self.rig.us(land, lambda: residency.drop(rows, stream=stream))
        claimed = residency.report()["claimed"]
        assert claimed == row_count, f"{claimed} rows claimed, {row_count} expected"
        return taken


def selections(
    batch: int, queries: int, top_k: int, misses: int, context: int, turns: int
) -> np.ndarray:
    """[turn, request * queries, k]; the queries of a request select the same rows."""
    random = np.random.default_rng(batch)
    hot_count = top_k - misses
    rows = np.empty((turns, batch, queries, top_k), np.int32)
    for request in range(batch):
        order = random.permutation(context)[: hot_count + turns * misses] + request * context
        rows[:, request, :, :hot_count] = order[:hot_count]
        cold = order[hot_count:].reshape(turns, 1, misses)
        rows[:, request, :, hot_count:] = cold
    rows.sort(axis=-1)
    return rows.reshape(turns, batch * queries, top_k)


def resolve_benchmark(*, smoke: bool) -> Iterator[Row]:
    rig = GpuRig(repeats=1 if smoke else 15)
    scale = 32 if smoke else 1
    for batch in (2,) if smoke else (1, 4, 16, 32, 80, 160):
        for queries in (2,) if smoke else (1, 2):
            for misses in (0, 16 if smoke else MISSES):
                cycle = Cycle(rig, batch=batch, queries=queries, misses=misses, scale=scale)
                yield from plan_rows(cycle, batch, queries, misses)
        row_count = min(LANDING_ROWS, cycle.shape.query_max * TOP_K) // scale
        yield row(
            f"warm and land {row_count} rows, batch {batch}", "us", cycle.landing_us(row_count)
        )


def plan_rows(cycle: Cycle, batch: int, queries: int, misses: int) -> Iterator[Row]:
    """A plan and the landing of its rows, which is one more small kernel."""
    chosen = cycle.shape.together
    wanted = WANTED_US.get(batch) if misses and queries == 1 else None
    baseline = None if wanted is None else ("wanted", wanted)
    for together in sorted(WAYS, key=lambda way: way != chosen):
        if together == 1 and batch > ALONE_BATCH_MAX:
            continue
        try:
            us = cycle.us(together)
        except (BadState, Unavailable) as error:
            if together == chosen:
                raise
            print(f"{WAYS[together]}: not measured, {error}", file=sys.stderr)
            continue
        yield row(
            f"plan and land, batch {batch}, {WAYS[together]}",
            "us",
            us,
            baseline=baseline,
            target=1.0 if wanted is not None and together == chosen else None,
            queries=queries,
            misses=misses,
            turns=cycle.turns,
        )
        if together == chosen:
            baseline = ("chosen way", statistics.median(us))
