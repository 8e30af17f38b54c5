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
from ess.pool.lru.cuda import Residency, forget_tickets
from ess.pool.lru.cuda_audit import FINDINGS
from ess.pool.lru.cuda_new_rows import NewRows
from ess.pool.lru.cuda_shape import (
    FIRST,
    PHASE_THREADS,
    Moment,
    ResolveShape,
)
from ess.pool.lru.cuda_workspaces import ResidencyWorkspaces, now_of
from ess.units import PAGE_ROWS, div_ceil
from tests.support.device_residency import (
    DeviceCampaign,
    Specified,
    host_pages,
    host_rows,
    in_flight,
)
from tests.support.device_scenarios import ROW_BYTES, move, random_rows
from tests.support.twins import CLAIMED

SLAB = ("slot_of", "row_of", "last_use", "ticket_of", "dirty", "hit_age")
ARENA = (*SLAB, "blocks", "block_count")
SPLIT = ("slots", "hit", "miss", "place", "hit_count", "miss_count", "place_count")


class OnDevice:
    """The operations of the specification, run on a device.

    The arena goes there and back at every call, so that campaigns written for arrays of the host
    can be played. `landed` has the latest ticket of each lane whose copy has landed.
    """

    def __init__(self, *, is_together):
        self.device = Device()
        self.stream = CudaStream(self.device)
        self.is_together = is_together
        self.landed = [0, 0]
        self.held = []

    def there(self, array):
        """It lives until the call is over."""
        self.held.append(DeviceArray(self.device, array))
        return self.held[-1]

    @contextmanager
    def residency(self, arena, *, lines=1, width=1, step=1, ticket=None, query_count=0):
        there = arena_on(self.device, arena)
        block_max = max(1, arena.blocks.size)
        shape = residency_shape(lines, width, block_max, is_together=self.is_together)
        work = ResidencyWorkspaces(self.device, shape, lambda n: ints(self.device, n), ring=1)
        residency = Residency(self.device, there, work)
        given = {"step": step, "query_count": query_count, "landed": self.landed[0]}
        given |= {"ticket": self.landed[0] if ticket is None else ticket - 2}
        work.now.write(now_of(**given, behind=self.landed[1]))
        work.begin(stream=self.stream.handle)
        yield residency
        self.stream.synchronize()
        for name in SLAB:
            getattr(arena, name)[...] = getattr(there, name).read()
        if there.rank_of is not None:
            arena.eviction.rank_of[...] = there.rank_of.read()
        self.held.clear()

    def plan(self, arena, rows, *, step, ticket, split):
        splits = {name: self.there(getattr(split, name)) for name in SPLIT}
        size = {"lines": rows.shape[0], "width": rows.shape[1], "query_count": len(rows)}
        pages = self.there(host_pages(arena.slot_of.size))
        with self.residency(arena, step=step, ticket=ticket, **size) as residency:
            given = SimpleNamespace(**splits), self.there(rows)
            residency.plan(*given, stream=self.stream.handle, host_page_of=pages)
        for name, array in splits.items():
            getattr(split, name)[...] = array.read()
        return claims_of(residency)

    def observe(self, arena, lookup, selection, line_of, length, *, logits):
        context = {"page_table": lookup.lines, "table_row": line_of, "length": length}
        given = {name: self.there(array) for name, array in context.items()}
        given["scales"] = ints(self.device, 2 * len(selection))
        given["holders"] = self.there(np.zeros(2 * (arena.slot_of.size // PAGE_ROWS), np.int32))
        given |= {"positions": self.there(selection), "logits": self.there(logits)}
        with self.residency(arena, query_count=len(selection)) as residency:
            residency.observe(**given, stream=self.stream.handle, moment=FIRST)
        assert residency.report()["faults"] == 0
        assert not given["holders"].read().any()

    def claim_new(self, arena, rows, *, step, out):
        """There, where there is room; that there is, the ledger promises."""
        here = deepcopy(arena)
        here.ticket_of[:] = in_flight(here.ticket_of, self.landed)
        if rows.size == 0 or not specification.claim_new(here, rows, step=step, out=out):
            return rows.size == 0
        with self.residency(arena, step=step) as residency:
            new = NewRows(
                self.device,
                [residency.arena],
                self.there(rows[None]),
                residency.workspaces.now,
                ints=lambda count: ints(self.device, count),
                block_max=max(1, arena.blocks.size),
            )
            new.claim(range(1), stream=self.stream.handle)
        out[:] = new.slots.read()
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
        assert ticket > self.landed[ticket % 2], "a lane lands its copies in order"
        self.landed[ticket % 2] = ticket

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
            residency.check(ints(self.device, FINDINGS), stream=self.stream.handle)


def arena_on(device, arena):
    counted = {"block_count": np.array([arena.blocks.size], np.int32)}
    arrays = {name: getattr(arena, name) for name in (*SLAB, "blocks")} | counted
    if arena.eviction.name == "score":
        arrays["rank_of"] = arena.eviction.rank_of
    there = {name: DeviceArray(device, array) for name, array in arrays.items()}
    return SimpleNamespace(**{"rank_of": None} | there)


def claims_of(residency, moment=FIRST):
    report = residency.report(part=moment.part)
    assert report["faults"] == report["unwritten"] == 0, report
    slots = residency.claims(moment).slots.read()[: report["claimed"]]
    return FetchPlan(
        group=0,
        ticket=0,
        slots=slots,
        rows=residency.arena.row_of.read()[slots],
        hit_count=report["hits"],
        place_count=report["places"],
        late_ticket=report["late_ticket"],
        evicted_count=report["evicted"],
    )


def ints(device, count):
    return DeviceArray(device, np.full(count, -7, np.int32))


def residency_shape(query_max, top_k, block_max, *, is_together):
    """As serving launches it, whatever the size."""
    return ResolveShape(
        query_max=query_max,
        top_k=top_k,
        block_max=block_max,
        is_together=is_together,
        threads=PHASE_THREADS,
    )


class Step:
    """Plans and fetches as one graph over one group, beside the same in NumPy.

    A step has two halves, as under DBA: both are planned, then both are fetched, and the stream has
    waited for neither when the second is planned.
    """

    def __init__(self, *, query_max, top_k, row_count, slot_count, is_together, seed=0):
        self.random = np.random.default_rng(seed)
        self.device = Device()
        self.compute = CudaStream(self.device)
        self.arena = Arena.alone(row_count=row_count, slot_count=slot_count)
        self.splits_here = [Split.create(query_count=query_max, top_k=top_k) for _ in range(2)]
        self.shape = residency_shape(query_max, top_k, slot_count // 64, is_together=is_together)
        make = {"part_max": 2, "ring": 2}
        self.work = ResidencyWorkspaces(self.device, self.shape, self.ints, **make)
        self.residency = Residency(self.device, arena_on(self.device, self.arena), self.work)
        self.splits = [
            SimpleNamespace(**{n: DeviceArray(self.device, getattr(split, n)) for n in SPLIT})
            for split in self.splits_here
        ]
        self.halves = Moment(copy=1, part=0), Moment(copy=2, part=1, first=query_max)
        self.rows = DeviceArray(self.device, np.zeros((2 * query_max, top_k), np.int32))
        self.pages = host_pages(row_count)
        self.pages_there = DeviceArray(self.device, self.pages)
        host_row_count = 2 * len(self.pages) * PAGE_ROWS
        pool = pinned_memory(self.device, host_row_count * ROW_BYTES, touch_threads=1)
        self.pool = pool.reshape(-1, ROW_BYTES)
        self.pool[:] = random_rows(self.random, host_row_count)
        self.slab = DeviceArray(self.device, np.zeros((slot_count, ROW_BYTES), np.uint8))
        self.device.kernel(flat_form(ROW_BYTES).program, flat_form(ROW_BYTES).entry)
        self.given, self.behind = 0, 1
        self.graph = CudaGraph(self.device)
        with self.graph.capture(self.compute.handle):
            self.queue()

    def ints(self, count):
        return ints(self.device, count)

    def queue(self):
        stream, half = self.compute.handle, self.shape.query_max
        self.work.begin(stream=stream)
        for moment, split in zip(self.halves, self.splits, strict=True):
            lines = self.rows[moment.first : moment.first + half]
            given = {"moment": moment, "host_page_of": self.pages_there}
            self.residency.plan(split, lines, stream=stream, **given)
        for moment in self.halves:
            self.fetch(self.residency.claims(moment))

    def fetch(self, claims):
        """The rows that a call has claimed."""
        source = SimpleNamespace(
            data_ptr=lambda: int(self.pool.__array_interface__["data"][0]),
            stride=lambda: (ROW_BYTES, 1),
        )
        lists = {"source_rows": claims.host_rows, "target_rows": claims.slots}
        move(self, flat_form(ROW_BYTES), source, self.slab, **lists, count=claims.count)

    def replay(self, step, rows):
        """Of the queries the last half may be absent. All copies of steps have landed."""
        half, claimed = self.shape.query_max, []
        for number, (moment, split) in enumerate(zip(self.halves, self.splits_here, strict=True)):
            lines = rows[moment.first : moment.first + half]
            given = {"step": step, "ticket": self.given + 2 * moment.copy}
            claimed.append(Specified().plan(self.arena, lines, **given, split=split))
            assert number == 0 or len(lines) <= half
        for claims, moment in zip(claimed, self.halves, strict=True):
            ticket = self.given + 2 * moment.copy
            specification.land(self.arena, claims.slots, ticket=ticket)
        there = np.full(self.rows.shape, -77, np.int32)
        there[: len(rows)] = rows
        self.rows.write(there)
        self.now(step, len(rows))
        self.graph.launch(self.compute.handle)
        self.compute.synchronize()
        for claims, moment in zip(claimed, self.halves, strict=True):
            claims_there = claims_of(self.residency, moment)
            for field in CLAIMED:
                expected = getattr(claims, field)
                np.testing.assert_array_equal(getattr(claims_there, field), expected, field)
        self.given += 4

    def now(self, step, query_count, *, stamps=True):
        given = {"step": step, "ticket": self.given, "landed": self.given, "behind": self.behind}
        self.work.now.write(now_of(**given, query_count=query_count, stamps=stamps))

    def check(self, step):
        for name in SLAB:
            there, here = getattr(self.residency.arena, name).read(), getattr(self.arena, name)
            if name == "ticket_of":
                there = in_flight(there, (self.given, self.behind))
            np.testing.assert_array_equal(there, here, f"{name} at {step}")
        for here, splits in zip(self.splits_here, self.splits, strict=True):
            for name in SPLIT:
                there = getattr(splits, name).read()
                np.testing.assert_array_equal(there, getattr(here, name), f"{name} at {step}")
        used = np.flatnonzero((self.arena.row_of >= 0) & (self.arena.ticket_of == 0))
        rows = host_rows(self.arena.row_of[used], self.pages)
        np.testing.assert_array_equal(self.slab.read()[used], self.pool[rows])

    def select(self):
        """Mostly what is resident, some of it twice, pads among it."""
        shape = (2 * self.shape.query_max, self.shape.top_k)
        rows = self.random.integers(0, self.arena.slot_of.size, shape)
        resident = self.arena.row_of[self.arena.row_of >= 0]
        if resident.size:
            kept = self.random.random(shape) < 0.9
            rows = np.where(kept, self.random.choice(resident, shape), rows)
        rows[self.random.random(shape) < 0.05] = -1
        return rows.astype(np.int32)


def a_graph_is_replayed_with_changing_selections(replay_count=8, is_together=True):
    step = Step(query_max=2, top_k=96, row_count=640, slot_count=256, is_together=is_together)
    for number in range(replay_count):
        step.replay(300 + number, step.select()[: 4 - number % 3])
        if number % 2 == 0 or number == replay_count - 1:
            step.check(300 + number)


def phases_replay_a_graph():
    a_graph_is_replayed_with_changing_selections(4, is_together=False)


def tickets_start_over_when_all_has_landed():
    """Old tickets are above new ones: without the clearing all would seem to be in flight."""
    step = Step(query_max=2, top_k=96, row_count=640, slot_count=256, is_together=True)
    step.given = (1 << 31) - 10
    for number in range(2):
        step.replay(300 + number, step.select())
    forget_tickets(step.device, step.residency.arena.ticket_of, stream=step.compute.handle)
    step.given = 0
    for number in range(2, 4):
        step.replay(300 + number, step.select())
        step.check(300 + number)


def positions_become_slots_when_all_is_resident():
    random = np.random.default_rng(4)
    step = Step(query_max=3, top_k=40, row_count=640, slot_count=128, is_together=True)
    step.replay(300, random.integers(0, 640, (3, 40)).astype(np.int32))
    arena, residency, stream = step.arena, step.residency, step.compute.handle
    resident = arena.row_of[arena.row_of >= 0]
    rows = random.choice(resident, (3, 20)).astype(np.int32)
    rows[:, ::7] = -1
    slots = DeviceArray(step.device, np.full((3, 24), -5, np.int32))
    step.now(305, 3, stamps=False)
    selected = DeviceArray(step.device, rows)
    residency.locate(slots, selected, stream=stream)
    step.compute.synchronize()
    slots_read = slots.read()
    np.testing.assert_array_equal(slots_read[:, :20], np.where(rows < 0, -1, arena.slot_of[rows]))
    assert (slots_read[:, 20:] == -5).all()
    step.check(300)
    absent = np.flatnonzero(arena.slot_of < 0)[:4].astype(np.int32)[None]
    step.now(305, 3)
    for given_rows in (selected, DeviceArray(step.device, absent)):
        residency.locate(slots, given_rows, stream=stream)
        step.compute.synchronize()
    assert residency.report()["faults"] == absent.size
    assert set(residency.arena.last_use.read()[arena.slot_of[rows[rows >= 0]]]) == {305}
    for moment, count in ((FIRST, 2), (Moment(first=5), 7)):
        fewer = DeviceArray(step.device, np.full((3, 24), -5, np.int32))
        step.now(305, count, stamps=False)
        residency.locate(fewer, selected, stream=stream, moment=moment)
        step.compute.synchronize()
        np.testing.assert_array_equal(fewer.read()[:2], slots_read[:2])
        assert (fewer.read()[2] == -5).all()


def what_is_in_flight_is_not_located():
    """Of two copies, only rows of the copy that was waited for are located."""
    step = Step(query_max=2, top_k=40, row_count=640, slot_count=128, is_together=True)
    rows = np.arange(160, dtype=np.int32).reshape(4, 40)[:, :30]
    rows = np.pad(rows, ((0, 0), (0, 10)), constant_values=-1)
    step.replay(300, rows)
    step.now(301, 4)
    given = {"step": 301, "ticket": 0, "landed": 0, "query_count": 4}
    for moment, landed_count in ((Moment(copy=3), 0), (Moment(copy=3, waited=1), 60)):
        step.work.now.write(now_of(**given))
        slots = DeviceArray(step.device, np.full((4, 40), -5, np.int32))
        lines = DeviceArray(step.device, rows)
        step.residency.locate(slots, lines, stream=step.compute.handle, moment=moment)
        step.compute.synchronize()
        expected = np.where(rows < 0, -1, step.arena.slot_of[rows]).reshape(-1)
        expected[80 * (landed_count // 60) :] = -1
        np.testing.assert_array_equal(slots.read().reshape(-1), expected)


def rows_leave_and_are_settled():
    step = Step(query_max=2, top_k=50, row_count=640, slot_count=128, is_together=True)
    step.replay(300, step.select())
    stream, arena = step.compute.handle, step.arena
    gone = np.unique(step.random.integers(0, 640, 300)).astype(np.int32)
    leaving = DeviceArray(step.device, np.insert(gone, 7, -1))
    step.residency.drop(leaving, stream=stream)
    specification.drop(arena, gone)
    used = np.flatnonzero(arena.row_of >= 0)[::2].astype(np.int32)
    arena.dirty[used] = 1
    step.residency.arena.dirty.write(arena.dirty)
    settled = DeviceArray(step.device, np.insert(used[:5], 2, -1))
    step.residency.settle(settled, stream=stream)
    specification.settle(arena, used[:5])
    step.compute.synchronize()
    step.check(300)


def the_lowest_ranks_give_way(is_together=False):
    world = DeviceCampaign(6, OnDevice(is_together=is_together), "score")
    for _ in range(4):
        world.one_step()
    assert world.seen["plan evicted_count"] > 0


class Landing:
    """The rows of a request that arrives: lists and a `now` of their own, over the arena of steps.

    One graph warms and one fills; rows, ages and their count are written before each replay.
    """

    def __init__(self, step, *, room):
        self.step, self.given = step, 1
        sizes = div_ceil(room, 48), 48, step.shape.block_max
        shape = residency_shape(*sizes, is_together=step.shape.is_together)
        self.work = ResidencyWorkspaces(step.device, shape, step.ints, ring=1)
        self.residency = Residency(step.device, step.residency.arena, self.work)
        self.rows, self.ages, self.count = step.ints(room), step.ints(room), step.ints(1)
        self.graphs = {"warm": CudaGraph(step.device), "fill": CudaGraph(step.device)}
        stream, given = step.compute.handle, {"host_page_of": step.pages_there}
        given |= {"stream": stream, "count": self.count}
        with self.graphs["warm"].capture(stream):
            self.work.begin(stream=stream)
            self.residency.warm(self.rows, self.ages, **given)
        with self.graphs["fill"].capture(stream):
            self.work.begin(stream=stream)
            self.residency.fill(self.rows, **given)

    def claim(self, name, rows, *ages, at):
        step, ticket = self.step, self.given + 2
        claims = getattr(specification, name)(step.arena, rows, *ages, step=at, ticket=ticket)
        now = {"step": at, "ticket": self.given, "behind": self.given}
        self.work.now.write(now_of(**now, landed=step.given, query_count=0))
        for there, here in zip((self.rows, self.ages), (rows, *ages), strict=False):
            there.write(np.pad(here, (0, there.shape[0] - here.size), constant_values=-77))
        self.count.write([rows.size])
        self.graphs[name].launch(step.compute.handle)
        step.compute.synchronize()
        claims_there = claims_of(self.residency)
        for field in CLAIMED:
            np.testing.assert_array_equal(
                getattr(claims_there, field), getattr(claims, field), field
            )
        return claims

    def land(self, claims):
        """Steps know of it from the next one on."""
        self.given += 2
        self.step.fetch(self.residency.claims())
        self.step.compute.synchronize()
        self.step.behind = self.given
        specification.land(self.step.arena, claims.slots, ticket=self.given)


def a_landing_warms_and_fills_behind_the_plans(is_together=True, row_count=640, slot_count=256):
    """Plans go on while its rows are under way, and read in place what they select of them."""
    sizes = {"row_count": row_count, "slot_count": slot_count}
    step = Step(query_max=2, top_k=slot_count // 5, **sizes, is_together=is_together)
    for number in range(290, 300):
        step.replay(number, step.select())
    landing = Landing(step, room=row_count)
    rows = step.random.permutation(row_count).astype(np.int32)
    for number, count in ((300, row_count - 5), (301, row_count // 3)):
        ages = np.sort(step.random.integers(1, 9, count)).astype(np.int32)
        claims = landing.claim("warm", rows[-count:], ages, at=number - 1)
        assert 0 < claims.evicted_count <= claims.slots.size < count
        step.replay(number, step.select())
        assert step.residency.report()["places"] > 0, "no query selected what is under way"
        landing.land(claims)
    gone = DeviceArray(step.device, rows[: row_count // 2])
    step.work.begin(stream=step.compute.handle)
    step.residency.drop(gone, stream=step.compute.handle)
    left = specification.drop(step.arena, gone.read())
    step.compute.synchronize()
    assert step.residency.report()["left"] == left > 0
    claims = landing.claim("fill", rows[::-1], at=301)
    assert claims.slots.size == left
    step.replay(302, step.select())
    landing.land(claims)
    step.check(302)
    step.now(302, 0)
    step.residency.check(step.ints(FINDINGS), stream=step.compute.handle)


def an_audit_names_what_is_wrong():
    operations = OnDevice(is_together=True)
    arena = Arena.alone(row_count=640, slot_count=128)
    rows = np.arange(50, 90, dtype=np.int32)
    specification.fill(arena, rows, step=300, ticket=5)
    operations.check(arena, step=300)
    arena.slot_of[600] = 3
    with pytest.raises(AssertionError, match=r"600 \(a row\) has a slot that holds another row"):
        operations.check(arena, step=300)
