"""What a plan costs on a device with the paper's misses in every step, for each way to run it.

A request keeps 1,948 hot rows and takes 100 of a cycle of cold ones, long enough that exact LRU has
dropped them before they come round: so every step of every request misses 100 rows, and the rows
lie at random. One graph plans the whole cycle; step numbers are written and reports cleared before
each replay, as once for all groups of a step.

The way that `ResolveShape.of` chooses comes first; a ratio above one says that another is faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Final

import numpy as np

from ess.bench.gpu.rig import GATE, GpuRig, Row, row
from ess.kernels.cuda.arrays import DeviceArray
from ess.kernels.cuda.driver import Device
from ess.kernels.cuda.graphs import CudaGraph
from ess.kernels.cuda.program import cubin
from ess.pool.cuda_programs import programs, rival_form
from ess.pool.lru.arena import Arena, Split
from ess.pool.lru.cuda import Residency
from ess.pool.lru.cuda_new_rows import NewRows
from ess.pool.lru.cuda_shape import FIRST, NOW, ResolveShape
from ess.pool.lru.cuda_workspaces import ResidencyWorkspaces, now_of, workspace_sizes
from ess.units import PAGE_ROWS, align_up, div_ceil

TOP_K: Final = 2048
MISSES: Final = 100
SLOTS: Final = 6400
CONTEXT_ROWS: Final = 32_768
LANDING_ROWS: Final = 6000
WANTED_US: Final = {1: 10.0, 160: 25.0}
WAYS: Final = {False: "a launch a phase", True: "one cluster"}
ALONE_BATCH_MAX: Final = 16
GROUPS: Final = 61
ROW_IDS: Final = 65_536
SLAB: Final = ("row_of", "last_use", "ticket_of", "dirty")


class Cycle:
    """Selections of a whole cycle on the device, and the arena that they are planned over."""

    def __init__(self, rig: GpuRig, *, batch: int, queries: int, misses: int, scale: int) -> None:
        self.rig, self.misses = rig, batch * misses
        top_k, slots, context = TOP_K // scale, SLOTS // scale // 64 * 64, CONTEXT_ROWS // scale
        self.turns = max(4, (slots - top_k) // max(1, misses) + 8) if misses else 8
        arena = Arena.alone(row_count=batch * context, slot_count=batch * slots)
        self.arena = arena_on(rig.device, arena)
        self.pages = DeviceArray(rig.device, host_pages(batch * context))
        split = Split.create(query_count=batch * queries, top_k=top_k)
        lists = ("slots", "hit", "miss", "place", "hit_count", "miss_count", "place_count")
        self.split = {name: DeviceArray(rig.device, getattr(split, name)) for name in lists}
        self.shape = ResolveShape.of(
            query_max=batch * queries, top_k=top_k, block_max=batch * slots // 64
        )
        self.rows = DeviceArray(
            rig.device, selections(batch, queries, top_k, misses, context, self.turns)
        )
        self.step = 300

    def residency(self, shape: ResolveShape, *, is_scored: bool = False) -> Residency:
        device, sizes = self.rig.device, workspace_sizes(shape, ring=1).values()
        ints = Ints(device, sum(align_up(size, Ints.UNIT) for size in sizes))
        arena = SimpleNamespace(**vars(self.arena))
        if is_scored:
            arena.rank_of = DeviceArray(device, np.zeros(arena.slot_of.shape[0], np.uint16))
        return Residency(device, arena, ResidencyWorkspaces(device, shape, ints, ring=1))

    def queue(self, residency: Residency, turn: int) -> None:
        rows = self.rows[turn : turn + 1]
        rows.shape = rows.shape[1:]
        residency.plan(
            SimpleNamespace(**self.split),
            rows,
            stream=self.rig.stream.handle,
            host_page_of=self.pages,
        )

    def renumber(self, residencies: list[Residency]) -> None:
        """Gives each turn a step number of its own, and clears the reports."""
        for turn, residency in enumerate(residencies):
            residency.workspaces.now.write(self.now(self.step + turn))
            residency.workspaces.begin(stream=self.rig.stream.handle)
        self.step += self.turns

    def now(self, step: int) -> list[int]:
        """What the step before has fetched has landed."""
        count = self.shape.query_max
        return now_of(step=step, query_count=count, ticket=2 * step, landed=2 * step)

    def us(self, *, is_together: bool) -> list[float]:
        """Microseconds of one plan; the arena is as the previous measurement left it."""
        shape = replace(self.shape, is_together=is_together)
        turns = [self.residency(shape) for _ in range(self.turns)]
        graph = CudaGraph(self.rig.device)
        with graph.capture(self.rig.stream.handle):
            for turn, residency in enumerate(turns):
                self.queue(residency, turn)
        taken = self.rig.us(
            lambda: graph.launch(self.rig.stream.handle), lambda: self.renumber(turns)
        )
        for residency in turns:
            claimed = residency.report()["claimed"]
            assert claimed == self.misses, f"{claimed} rows claimed, {self.misses} expected"
        return [us / self.turns for us in taken]

    def landing_us(self, row_count: int) -> list[float]:
        """Microseconds to land rows that have just left: they warm among the rows of the batch."""
        device, stream = self.rig.device, self.rig.stream.handle
        shape = replace(self.shape, is_together=False)
        residency = self.residency(shape)
        order = np.random.default_rng(0).permutation(row_count)
        rows = DeviceArray(device, order.astype(np.int32))
        ages = DeviceArray(device, np.ones(row_count, np.int32))
        residency.workspaces.now.write(self.now(self.step + 400))

        def leave() -> None:
            residency.drop(rows, stream=stream)
            residency.workspaces.begin(stream=stream)

        def warm() -> None:
            residency.warm(rows, ages, stream=stream, host_page_of=self.pages)

        taken = self.rig.us(warm, leave)
        claimed = residency.report()["claimed"]
        assert claimed == row_count, f"{claimed} rows claimed, {row_count} expected"
        return taken


class Scores:
    """Logits of whole contexts, which the ranks of all their rows follow: no two requests share a
    page."""

    def __init__(self, rig: GpuRig, cycle: Cycle, *, batch: int, queries: int) -> None:
        self.rig, line_count = rig, batch * queries
        context = cycle.arena.slot_of.shape[0] // batch
        self.name = f"ranks follow logits, batch {batch}, {context} rows each"
        pages = np.arange(batch * context // PAGE_ROWS, dtype=np.int32).reshape(batch, -1)
        logits = np.random.default_rng(4).normal(size=(1, context)).astype(np.float32)
        chosen = np.arange(cycle.shape.top_k, dtype=np.int32)[None]
        arrays = {
            "positions": chosen.repeat(line_count, 0),
            "logits": logits.repeat(line_count, 0),
            "scales": np.zeros(2 * line_count, np.float32),
            "holders": np.zeros(2 * pages.size, np.int32),
            "page_table": pages,
            "table_row": np.arange(batch, dtype=np.int32).repeat(queries),
            "length": np.full(line_count, context, np.int32),
        }
        self.given = {name: DeviceArray(rig.device, array) for name, array in arrays.items()}
        self.residency = cycle.residency(replace(cycle.shape, is_together=False), is_scored=True)
        self.residency.workspaces.now.write(cycle.now(cycle.step))

    def us(self) -> list[float]:
        stream = self.rig.stream.handle
        return self.rig.us(
            lambda: self.residency.observe(**self.given, stream=stream, moment=FIRST)
        )


class Ints:
    """Arrays in one memory: each of its own would take a millisecond of the driver, and there are a
    dozen for each turn."""

    UNIT: Final = 64

    def __init__(self, device: Device, count: int) -> None:
        self._all, self._taken = DeviceArray(device, np.zeros(count, np.int32)), 0

    def __call__(self, count: int) -> DeviceArray:
        begin, self._taken = self._taken, self._taken + align_up(count, self.UNIT)
        assert self._taken <= self._all.shape[0], f"{self._taken} of {self._all.shape[0]} numbers"
        return self._all[begin : begin + count]


class Claims:
    """Slots for a step's new rows, in groups that own a part each of one slab."""

    def __init__(self, rig: GpuRig, *, row_count: int, group_blocks: int) -> None:
        self.rig, self.step, self.random = rig, 300, np.random.default_rng(2)
        device, block_count = rig.device, GROUPS * group_blocks
        slab = Arena.alone(row_count=ROW_IDS, slot_count=64 * block_count)
        shared = {name: DeviceArray(device, getattr(slab, name)) for name in SLAB}
        self.dirty = shared["dirty"]
        self.groups: list[SimpleNamespace] = []
        for blocks in np.split(slab.blocks, GROUPS):
            slab.blocks = blocks
            self.groups.append(SimpleNamespace(**lists_on(device, slab), **shared))
        self.rows = DeviceArray(device, np.zeros((1, row_count), np.int32))
        self.now = DeviceArray(device, np.zeros(len(NOW), np.int32))
        ints = lambda n: DeviceArray(device, np.zeros(n, np.int32))  # noqa: E731
        self.new = NewRows(
            device, self.groups, self.rows, self.now, ints=ints, block_max=group_blocks
        )

    def us(self) -> list[float]:
        stream = self.rig.stream.handle
        return self.rig.us(lambda: self.new.claim(range(GROUPS), stream=stream), self.renew)

    def renew(self) -> None:
        """The rows of the step before have been stored, and these are others."""
        self.step += 1
        self.rows.write(self.random.permutation(ROW_IDS)[: self.rows.shape[1]])
        self.now.write(now_of(step=self.step, ticket=0, query_count=0))
        self.dirty.write(np.zeros(self.dirty.shape, np.uint8))


def arena_on(device: Device, arena: Arena) -> SimpleNamespace:
    slab = {name: DeviceArray(device, getattr(arena, name)) for name in SLAB}
    return SimpleNamespace(**slab, **lists_on(device, arena))


def lists_on(device: Device, arena: Arena) -> dict[str, DeviceArray | None]:
    """Lists of a group that groups over one slab do not share. Rows give way by lru."""
    own = {name: getattr(arena, name) for name in ("slot_of", "blocks", "hit_age")}
    own["block_count"] = np.array([arena.blocks.size], np.int32)
    return {"rank_of": None} | {name: DeviceArray(device, array) for name, array in own.items()}


def host_pages(row_count: int) -> np.ndarray:
    """Where the pages of these rows are on the host: in no order."""
    return np.random.default_rng(1).permutation(div_ceil(row_count, 64)).astype(np.int32)


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


def resolve_kernels() -> None:
    """All programs that NVRTC compiles for this device, side by side."""
    device = Device()
    rivals = (rival_form(row_bytes, unit) for row_bytes, unit in ((656, 16), (656, 8)))
    wanted = [*programs(), GATE, *(form.program for form in rivals)]
    with ThreadPoolExecutor() as pool:
        for _ in pool.map(lambda each: cubin(each, device.arch), wanted):
            pass


def resolve_benchmark(*, smoke: bool) -> Iterator[Row]:
    rig = GpuRig(repeats=1 if smoke else 15)
    scale = 32 if smoke else 1
    for batch in (2,) if smoke else (*WANTED_US, 4, 16, 32, 80):
        for queries in (2,) if smoke else (1, 2):
            for misses in (0, 16 if smoke else MISSES):
                cycle = Cycle(rig, batch=batch, queries=queries, misses=misses, scale=scale)
                yield from plan_rows(cycle, batch, queries, misses)
            scores = Scores(rig, cycle, batch=batch, queries=queries)
            yield row(scores.name, "us", scores.us(), queries=queries)
        row_count = min(LANDING_ROWS, cycle.shape.query_max * TOP_K) // scale
        yield row(f"warm {row_count} rows, batch {batch}", "us", cycle.landing_us(row_count))
        claims = Claims(rig, row_count=2 * batch, group_blocks=max(1, batch * SLOTS // scale // 64))
        yield row(f"slots for {2 * batch} new rows, {GROUPS} groups", "us", claims.us())


def plan_rows(cycle: Cycle, batch: int, queries: int, misses: int) -> Iterator[Row]:
    chosen = cycle.shape.is_together
    wanted = WANTED_US.get(batch) if misses and queries == 1 else None
    baseline = None if wanted is None else ("wanted", wanted)
    for is_together in (chosen, not chosen):
        if is_together and batch > ALONE_BATCH_MAX:
            continue
        us = cycle.us(is_together=is_together)
        yield row(
            f"plan, batch {batch}, {WAYS[is_together]}",
            "us",
            us,
            baseline=baseline,
            target=1.0 if wanted is not None and is_together == chosen else None,
            queries=queries,
            misses=misses,
            turns=cycle.turns,
        )
        if is_together == chosen:
            baseline = ("chosen way", statistics.median(us))
