"""What the residency of a device must do, on a real one and on the emulated driver."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest

from ess.kernels.cuda.arrays import DeviceArray
from ess.kernels.cuda.driver import Device
from ess.kernels.cuda.graphs import CudaGraph
from ess.kernels.cuda.pinned import pinned_memory
from ess.kernels.cuda.rows import flat_form
from ess.kernels.cuda.streams import CudaStream
from ess.pool.lru import specification
from ess.pool.lru.arena import Arena, FetchPlan, Split
from ess.pool.lru.cuda import Residency, now_of
from ess.pool.lru.cuda_records import CLUSTER_BLOCKS, REPORT, ResolveShape
from ess.units import div_ceil
from tests.support.device_scenarios import ROW_BYTES, move, random_rows
from tests.support.twins import CLAIMED

ARENA = ("slot_of", "row_of", "last_use", "ticket_of", "dirty", "blocks", "hit_age")
SPLIT = ("slots", "hit", "miss", "place", "hit_count", "miss_count", "place_count")


class OnDevice:
    """The operations of the specification, run on a device.

    The arena goes there and back at every call, so that campaigns written for arrays of the host
    can be played.
    """

    def __init__(self, *, together):
        self.device = Device()
        self.stream = CudaStream(self.device)
        self.together = together
        self.held = []

    def there(self, array):
        """It lives until the call is over."""
        self.held.append(DeviceArray(self.device, array))
        return self.held[-1]

    @contextmanager
    def residency(self, arena, *, lines=1, width=1, **now):
        there = {name: self.there(getattr(arena, name)) for name in ARENA}
        shape = residency_shape(lines, width, max(1, arena.blocks.size), together=self.together)
        residency = Residency(
            self.device, shape, SimpleNamespace(**there), lambda n: ints(self.device, n)
        )
        given = {"step": 1, "ticket": 1, "query_count": 0, "block_count": arena.blocks.size}
        residency.now.write(now_of(**given | now))
        residency.workspace["report"].write(np.zeros(len(REPORT), np.int32))
        yield residency
        self.stream.synchronize()
        for name, array in there.items():
            getattr(arena, name)[...] = array.read()
        self.held.clear()

    def plan(self, arena, rows, *, step, ticket, split, purpose="select"):
        splits = {name: self.there(getattr(split, name)) for name in SPLIT}
        size = {"lines": rows.shape[0], "width": rows.shape[1], "query_count": len(rows)}
        with self.residency(arena, step=step, ticket=ticket, **size) as residency:
            given = SimpleNamespace(**splits), self.there(rows)
            residency.plan(*given, stream=self.stream.handle, purpose=purpose)
        for name, array in splits.items():
            getattr(split, name)[...] = array.read()
        return claims_of(residency)

    def claim_new(self, arena, rows, *, step, out):
        """There, where there is room; that there is, the ledger promises."""
        if rows.size == 0 or not specification.claim_new(deepcopy(arena), rows, step=step, out=out):
            return specification.claim_new(arena, rows, step=step, out=out)
        split = Split.create(query_count=1, top_k=rows.size)
        self.plan(arena, rows[None], step=step, ticket=1, split=split, purpose="write")
        out[:] = split.slots[0]
        return True

    def warm(self, arena, rows, ages, *, step, ticket):
        size = {"lines": div_ceil(max(1, rows.size), 32), "width": 32}
        with self.residency(arena, step=step, ticket=ticket, **size) as residency:
            ages = None if ages is None else self.there(ages)
            residency.warm(self.there(rows), ages, stream=self.stream.handle)
        return claims_of(residency)

    def fill(self, arena, rows, *, step, ticket):
        return self.warm(arena, rows, None, step=step, ticket=ticket)

    def land(self, arena, slots, *, ticket):
        with self.residency(arena, ticket=ticket) as residency:
            residency.land(self.there(slots), stream=self.stream.handle)

    def settle(self, arena, slots):
        with self.residency(arena) as residency:
            residency.settle(self.there(slots), stream=self.stream.handle)

    def drop(self, arena, rows):
        with self.residency(arena) as residency:
            residency.drop(self.there(rows), stream=self.stream.handle)
        return residency.report()["left"]

    def clear_block(self, arena, block, *, step):
        blocks = self.there(np.array([block], np.int32))
        with self.residency(arena, step=step) as residency:
            residency.clear_blocks(blocks, stream=self.stream.handle)
        return residency.report()["held"] == 0

    def check(self, arena, *, step):
        with self.residency(arena, step=step) as residency:
            residency.check(stream=self.stream.handle)


def claims_of(residency):
    report = residency.report()
    assert report["faults"] == 0, report
    count = report["claimed"]
    return FetchPlan(
        group=0,
        ticket=0,
        slots=residency.workspace["claimed_slots"].read()[:count],
        rows=residency.workspace["claimed_rows"].read()[:count],
        hit_count=report["hits"],
        place_count=report["places"],
        late_ticket=report["late_ticket"],
        evicted_count=report["evicted"],
    )


def ints(device, count):
    return DeviceArray(device, np.full(count, -7, np.int32))


def residency_shape(query_max, top_k, block_max, *, together):
    """A cluster in small blocks: the emulated device has a stack for every thread of it."""
    return ResolveShape(
        query_max=query_max,
        top_k=top_k,
        block_max=block_max,
        together=together,
        threads={0: 512, 1: 1024}.get(together, 128),
    )


class Step:
    """Plan, fetch and land as one graph over one group, beside the same in NumPy."""

    def __init__(self, *, query_max, top_k, row_count, slot_count, together, seed=0):
        self.random = np.random.default_rng(seed)
        self.device = Device()
        self.compute = CudaStream(self.device)
        self.arena = Arena.alone(row_count=row_count, slot_count=slot_count)
        self.split = Split.create(query_count=query_max, top_k=top_k)
        there = {name: DeviceArray(self.device, getattr(self.arena, name)) for name in ARENA}
        self.shape = residency_shape(query_max, top_k, slot_count // 64, together=together)
        self.residency = Residency(
            self.device, self.shape, SimpleNamespace(**there), lambda n: ints(self.device, n)
        )
        self.splits = SimpleNamespace(
            **{name: DeviceArray(self.device, getattr(self.split, name)) for name in SPLIT}
        )
        self.rows = DeviceArray(self.device, np.zeros((query_max, top_k), np.int32))
        pool = pinned_memory(self.device, row_count * ROW_BYTES, touch_threads=1)
        self.pool = pool.reshape(-1, ROW_BYTES)
        self.pool[:] = random_rows(self.random, row_count)
        self.slab = DeviceArray(self.device, np.zeros((slot_count, ROW_BYTES), np.uint8))
        self.device.kernel(flat_form(ROW_BYTES).program, flat_form(ROW_BYTES).entry)
        self.graph = CudaGraph(self.device)
        with self.graph.capture(self.compute.handle):
            self.queue()

    def queue(self):
        stream, work = self.compute.handle, self.residency.workspace
        self.residency.plan(self.splits, self.rows, stream=stream)
        self.fetch(self.residency)
        self.residency.land(work["claimed_slots"], stream=stream, count=work["report"][:1])

    def fetch(self, residency):
        """The rows that its last call claimed."""
        work = residency.workspace
        source = SimpleNamespace(
            data_ptr=lambda: int(self.pool.__array_interface__["data"][0]),
            stride=lambda: (ROW_BYTES, 1),
        )
        move(
            self,
            flat_form(ROW_BYTES),
            source,
            self.slab,
            source_rows=work["claimed_rows"],
            target_rows=work["claimed_slots"],
            count=residency.claimed_count,
        )

    def replay(self, step, rows):
        claims = specification.plan(self.arena, rows, step=step, ticket=step, split=self.split)
        specification.land(self.arena, claims.slots, ticket=step)
        self.rows.write(rows)
        self.residency.now.write(
            now_of(
                step=step,
                ticket=step,
                query_count=len(rows),
                block_count=self.shape.block_max,
            )
        )
        self.graph.launch(self.compute.handle)
        self.compute.synchronize()
        assert self.residency.report()["claimed"] == claims.slots.size, step

    def check(self, step):
        for name in ARENA:
            there = getattr(self.residency.arena, name).read()
            np.testing.assert_array_equal(there, getattr(self.arena, name), f"{name} at {step}")
        for name in SPLIT:
            there = getattr(self.splits, name).read()
            np.testing.assert_array_equal(there, getattr(self.split, name), f"{name} at {step}")
        used = np.flatnonzero(self.arena.row_of >= 0)
        np.testing.assert_array_equal(self.slab.read()[used], self.pool[self.arena.row_of[used]])

    def select(self):
        """Mostly what is resident, some of it twice, pads among it."""
        shape = (self.shape.query_max, self.shape.top_k)
        rows = self.random.integers(0, self.arena.slot_of.size, shape)
        resident = self.arena.row_of[self.arena.row_of >= 0]
        if resident.size:
            kept = self.random.random(shape) < 0.9
            rows = np.where(kept, self.random.choice(resident, shape), rows)
        rows[self.random.random(shape) < 0.05] = -1
        return rows.astype(np.int32)


def a_graph_is_replayed_with_changing_selections(replay_count=8, check_every=2, together=1):
    step = Step(query_max=2, top_k=96, row_count=640, slot_count=256, together=together)
    for number in range(replay_count):
        step.replay(300 + number, step.select())
        if number % check_every == 0 or number == replay_count - 1:
            step.check(300 + number)


def a_cluster_replays_a_graph():
    a_graph_is_replayed_with_changing_selections(4, together=CLUSTER_BLOCKS)


def positions_become_slots_when_all_is_resident():
    random = np.random.default_rng(4)
    step = Step(query_max=3, top_k=40, row_count=640, slot_count=128, together=1)
    step.replay(300, random.integers(0, 640, (3, 40)).astype(np.int32))
    arena, residency = step.arena, step.residency
    resident = arena.row_of[arena.row_of >= 0]
    rows = random.choice(resident, (3, 20)).astype(np.int32)
    rows[:, ::7] = -1
    slots = DeviceArray(step.device, np.full((3, 24), -5, np.int32))
    given = {"step": 305, "ticket": 1, "query_count": 3, "block_count": 2}
    residency.now.write(now_of(**given, stamps=False))
    selected = DeviceArray(step.device, rows)
    residency.locate(slots, selected, stream=step.compute.handle)
    step.compute.synchronize()
    found = slots.read()
    np.testing.assert_array_equal(found[:, :20], np.where(rows < 0, -1, arena.slot_of[rows]))
    assert (found[:, 20:] == -5).all()
    step.check(300)
    absent = np.flatnonzero(arena.slot_of < 0)[:4].astype(np.int32)[None]
    residency.now.write(now_of(**given, stamps=True))
    for given_rows in (selected, DeviceArray(step.device, absent)):
        residency.locate(slots, given_rows, stream=step.compute.handle)
        step.compute.synchronize()
    assert residency.report()["faults"] == absent.size
    assert set(residency.arena.last_use.read()[arena.slot_of[rows[rows >= 0]]]) == {305}
    fewer = DeviceArray(step.device, np.full((3, 24), -5, np.int32))
    residency.now.write(now_of(**given | {"query_count": 2}, stamps=False))
    residency.locate(fewer, selected, stream=step.compute.handle)
    step.compute.synchronize()
    np.testing.assert_array_equal(fewer.read()[:2], found[:2])
    assert (fewer.read()[2] == -5).all()


def rows_leave_and_are_settled():
    step = Step(query_max=2, top_k=50, row_count=640, slot_count=128, together=1)
    step.replay(300, step.select())
    stream, arena = step.compute.handle, step.arena
    gone = np.unique(step.random.integers(0, 640, 300)).astype(np.int32)
    leaving = DeviceArray(step.device, gone)
    step.residency.drop(leaving, stream=stream)
    specification.drop(arena, gone)
    used = np.flatnonzero(arena.row_of >= 0)[::2].astype(np.int32)
    arena.dirty[used] = 1
    step.residency.arena.dirty.write(arena.dirty)
    settled = DeviceArray(step.device, used[:5])
    step.residency.settle(settled, stream=stream)
    specification.settle(arena, used[:5])
    step.compute.synchronize()
    step.check(300)


class Landing:
    """The rows of a request that arrives: lists of their own, over the arena of the steps.

    One graph warms and one fills; rows, ages and their count are written before each replay.
    """

    def __init__(self, step, *, room, width=48):
        self.step = step
        shape = residency_shape(
            div_ceil(room, width), width, step.shape.block_max, together=step.shape.together
        )
        self.residency = Residency(
            step.device, shape, step.residency.arena, lambda n: ints(step.device, n)
        )
        self.rows, self.ages = ints(step.device, room), ints(step.device, room)
        self.count = ints(step.device, 1)
        self.graphs = {"warm": CudaGraph(step.device), "fill": CudaGraph(step.device)}
        stream = step.compute.handle
        with self.graphs["warm"].capture(stream):
            self.residency.warm(self.rows, self.ages, stream=stream, count=self.count)
        with self.graphs["fill"].capture(stream):
            self.residency.fill(self.rows, stream=stream, count=self.count)

    def claim(self, name, rows, *ages, at, ticket):
        step = self.step
        claims = getattr(specification, name)(step.arena, rows, *ages, step=at, ticket=ticket)
        now = {"query_count": 0, "block_count": self.residency.shape.block_max}
        self.residency.now.write(now_of(step=at, ticket=ticket, **now))
        for there, here in zip((self.rows, self.ages), (rows, *ages), strict=False):
            there.write(np.pad(here, (0, there.shape[0] - here.size), constant_values=-77))
        self.count.write([rows.size])
        self.graphs[name].launch(step.compute.handle)
        step.compute.synchronize()
        found = claims_of(self.residency)
        for field in CLAIMED:
            np.testing.assert_array_equal(getattr(found, field), getattr(claims, field), field)
        return claims

    def land(self, claims, *, ticket):
        residency, stream = self.residency, self.step.compute.handle
        self.step.fetch(residency)
        slots = residency.workspace["claimed_slots"]
        residency.land(slots, stream=stream, count=residency.claimed_count)
        self.step.compute.synchronize()
        specification.land(self.step.arena, claims.slots, ticket=ticket)


def a_landing_warms_and_fills_behind_the_plans(together=1, row_count=640, slot_count=256):
    """Plans go on while its rows are under way."""
    step = Step(
        query_max=2,
        top_k=slot_count // 5,
        row_count=row_count,
        slot_count=slot_count,
        together=together,
    )
    for number in range(290, 300):
        step.replay(number, step.select())
    landing = Landing(step, room=row_count)
    rows = step.random.permutation(row_count).astype(np.int32)
    for number, count in ((300, row_count - 5), (301, row_count // 3)):
        ages = np.sort(step.random.integers(1, 9, count)).astype(np.int32)
        claims = landing.claim("warm", rows[-count:], ages, at=number - 1, ticket=7000 + number)
        assert 0 < claims.evicted_count <= claims.slots.size < count
        step.replay(number, step.select())
        landing.land(claims, ticket=7000 + number)
    gone = DeviceArray(step.device, rows[: row_count // 2])
    step.residency.drop(gone, stream=step.compute.handle)
    left = specification.drop(step.arena, gone.read())
    step.compute.synchronize()
    assert step.residency.report()["left"] == left > 0
    claims = landing.claim("fill", rows[::-1], at=301, ticket=7302)
    assert claims.slots.size == left
    step.replay(302, step.select())
    landing.land(claims, ticket=7302)
    step.check(302)
    step.residency.check(stream=step.compute.handle)


def an_audit_names_what_is_wrong():
    operations = OnDevice(together=1)
    arena = Arena.alone(row_count=640, slot_count=128)
    rows = np.arange(50, 90, dtype=np.int32)
    specification.fill(arena, rows, step=300, ticket=5)
    operations.check(arena, step=300)
    arena.slot_of[600] = 3
    with pytest.raises(AssertionError, match=r"600 \(a row\) has a slot that holds another row"):
        operations.check(arena, step=300)
