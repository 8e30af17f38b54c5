"""What a plan costs on a device, with the misses of the paper in every step.

A request keeps 1,948 hot rows and takes 100 of a cycle of cold ones, long enough that exact LRU has
dropped them before they come round: so every step of every request misses 100 rows, and the rows
lie at random. One graph plans the whole cycle; new step numbers are written before each replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Final

import numpy as np

from ess.bench.gpu_rig import GpuRig, Row, row
from ess.kernels.cuda.arrays import DeviceArray
from ess.kernels.cuda.driver import call
from ess.kernels.cuda.graphs import CudaGraph
from ess.kernels.cuda.residency import Residency, now_of
from ess.kernels.cuda.resolve import ResolveShape
from ess.pool.arena import Arena, Split

TOP_K: Final = 2048
MISSES: Final = 100
SLOTS: Final = 6400
CONTEXT_ROWS: Final = 32_768
WANTED_US: Final = {1: 10.0, 160: 25.0}


class Cycle:
    """Selections of a whole cycle on the device, and the graph that plans them one by one."""

    def __init__(self, rig: GpuRig, *, batch: int, queries: int, misses: int, scale: int) -> None:
        self.rig, self.misses = rig, batch * misses
        top_k, slots, context = TOP_K // scale, SLOTS // scale // 64 * 64, CONTEXT_ROWS // scale
        self.turns = max(4, (slots - top_k) // max(1, misses) + 8) if misses else 8
        arena = Arena.alone(row_count=batch * context, slot_count=batch * slots)
        names = ("slot_of", "row_of", "last_use", "ticket_of", "dirty", "blocks", "hit_age")
        there = {name: DeviceArray(rig.device, getattr(arena, name)) for name in names}
        split = Split.create(query_count=batch * queries, top_k=top_k)
        lists = ("slots", "hit", "miss", "place", "hit_count", "miss_count", "place_count")
        self.split = {name: DeviceArray(rig.device, getattr(split, name)) for name in lists}
        self.shape = ResolveShape.of(
            query_max=batch * queries, top_k=top_k, block_max=batch * slots // 64
        )
        self.residency = Residency(
            rig.device,
            self.shape,
            SimpleNamespace(**there),
            lambda n: DeviceArray(rig.device, np.zeros(n, np.int32)),
        )
        self.rows = DeviceArray(
            rig.device, selections(batch, queries, top_k, misses, context, self.turns)
        )
        self.nows = DeviceArray(rig.device, np.zeros((self.turns, 5), np.int32))
        self.step = 300
        self.graph = CudaGraph(rig.device)
        with self.graph.capture(rig.stream.handle):
            for turn in range(self.turns):
                self.queue(turn)

    def queue(self, turn: int) -> None:
        stream, now = self.rig.stream.handle, self.residency.now
        source = self.nows[turn : turn + 1].data_ptr()
        call("cuMemcpyDtoDAsync", now.data_ptr(), source, now.nbytes, stream)
        rows = self.rows[turn : turn + 1]
        rows.shape = rows.shape[1:]
        self.residency.plan(SimpleNamespace(**self.split), rows, stream=stream)
        claimed = self.residency.workspace["claimed_slots"]
        self.residency.land(claimed, stream=stream, count=self.residency.claimed_count)

    def renumber(self) -> None:
        self.nows.write(
            [
                now_of(
                    step=self.step + turn,
                    ticket=self.step + turn,
                    query_count=self.shape.query_max,
                    block_count=self.shape.block_max,
                )
                for turn in range(self.turns)
            ]
        )
        self.step += self.turns

    def us(self) -> list[float]:
        taken = self.rig.us(lambda: self.graph.launch(self.rig.stream.handle), self.renumber)
        claimed = self.residency.report()["claimed"]
        assert claimed == self.misses, f"{claimed} rows claimed, {self.misses} expected"
        return [one / self.turns for one in taken]


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
    rig = GpuRig(repeats=3 if smoke else 15)
    scale = 32 if smoke else 1
    for batch in (1, 2) if smoke else (1, 16, 80, 160):
        for queries in (1, 2):
            for misses in (0, 4 if smoke else MISSES):
                cycle = Cycle(rig, batch=batch, queries=queries, misses=misses, scale=scale)
                yield plan_row(cycle, batch, queries, misses)


def plan_row(cycle: Cycle, batch: int, queries: int, misses: int) -> Row:
    """With the landing of its rows, which is one small kernel more."""
    wanted = WANTED_US.get(batch) if misses and queries == 1 else None
    return row(
        f"plan and land, batch {batch}",
        "us",
        cycle.us(),
        baseline=None if wanted is None else ("wanted", wanted),
        target=None if wanted is None else 1.0,
        queries=queries,
        misses=misses,
        kernels=1 + len(cycle.shape.launches),
        turns=cycle.turns,
    )
