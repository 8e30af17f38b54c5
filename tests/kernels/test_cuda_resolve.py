"""The residency kernels, on an emulated device, against their specification, bit for bit.

The campaigns are those of the native planner: random requests, shared prefixes, parts of a step,
rows in flight, dirty rows, blocks that change owners. Every call runs on a new schedule.
"""

from __future__ import annotations

import types
from dataclasses import replace

import numpy as np
import pytest

from ess.errors import BadInput
from ess.kernels.cuda.resolve import NOW, REPORT, ResolveShape, resolve_program, resolve_record
from ess.pool import lru
from ess.pool.arena import AGE_MAX, Arena, Claims, Split
from tests.kernels.test_planner import Campaign, Side, assert_every_case_was_met, ids
from tests.support.device_scenarios import ARENA, SPLIT
from tests.support.emulate import emulated, lent, needs_compiler

pytestmark = needs_compiler

THREADS = 64


def shape_of(query_max, top_k, block_max, *, alone):
    """Blocks of two warps: all that crosses warps and tiles happens, at the cost of few fibers."""
    shape = ResolveShape.of(query_max=query_max, top_k=top_k, block_max=block_max)
    return replace(shape, alone=alone, threads=THREADS)


class Emulated:
    """Operations in which `plan` is the kernels' and the rest the specification's."""

    def __init__(self, folder, *, alone):
        self.alone, self.folder = alone, folder
        program = resolve_program(alone=alone, threads=THREADS)
        names = [one.entry for one in shape_of(1, 1, 1, alone=alone).launches]
        self.kernels = emulated(program, dict.fromkeys(names, "Resolve"), folder)
        self.seed = 0
        for name in ("clear_block", "drop", "fill", "land", "settle", "warm"):
            setattr(self, name, getattr(lru, name))

    def plan(self, arena, rows, /, *, step, ticket, split, **positions):
        assert split.holds(rows.shape), "as the specification does"
        shape = shape_of(*rows.shape, max(1, arena.blocks.size), alone=self.alone)
        self.work = {name: np.full(n, -77, np.int32) for name, n in shape.workspace.items()}
        self.work["now"][:] = step, ticket, len(rows), arena.blocks.size, 1
        if not self.alone:
            self.work["report"][:] = 0
        given = positions or {"rows": np.ascontiguousarray(rows)}
        record = resolve_record(shape, arena=arena, split=split, workspace=self.work, **given)
        arrays = given | self.work | {name: getattr(arena, name) for name in ARENA}
        arrays |= {name: getattr(split, name) for name in SPLIT}
        arrays = {name: array for name, array in arrays.items() if name != "writes"}
        unwritten = {*self.work, *SPLIT} - {"now", *([] if self.alone else ["report"])}
        with lent(self.folder, arrays, unwritten=unwritten):
            for entry, blocks in shape.launches:
                self.seed += 1
                self.kernels[entry](record, blocks=blocks, threads=THREADS, seed=self.seed)
        return self.claims()

    def claim_new(self, arena, rows, *, step, out):
        """The kernels', where there is room; that there is, the ledger promises them."""
        absent = int((arena.slot_of[rows] < 0).sum())
        if absent > self.room(arena, rows, step):
            return lru.claim_new(arena, rows, step=step, out=out)
        split = Split.create(query_count=1, top_k=max(1, rows.size))
        line = rows[None] if rows.size else np.full((1, 1), -1, np.int32)
        claims = self.plan(arena, line, step=step, ticket=1, split=split, rows=line, writes=True)
        assert claims.place_count == 0
        out[:] = split.slots[0, : rows.size]
        return True

    def room(self, arena, rows, step):
        slots = arena.slots
        bound = (arena.dirty[slots] != 0) | (arena.ticket_of[slots] != 0)
        kept = np.isin(arena.row_of[slots], rows) | (arena.last_use[slots] >= step)
        return int(((arena.row_of[slots] < 0) | ~(bound | kept)).sum())

    @property
    def report(self):
        return dict(zip(REPORT, self.work["report"].tolist(), strict=True))

    def claims(self):
        report = self.report
        assert report["faults"] == 0
        count = report["claimed"]
        return Claims(
            slots=self.work["claimed_slots"][:count],
            rows=self.work["claimed_rows"][:count],
            hit_count=report["hits"],
            place_count=report["places"],
            late_ticket=report["late_ticket"],
            evicted_count=report["evicted"],
        )


@pytest.fixture(scope="module", params=["phases", "alone"])
def operations(request, folder):
    return Emulated(folder, alone=request.param == "alone")


def campaign(operations, seed, step_count):
    world = Campaign(seed)
    world.sides = [Side(lru, (3, 2)), Side(operations, (3, 2))]
    for _ in range(step_count):
        world.one_step()
    return world.seen


def test_twenty_steps_agree(operations):
    campaign(operations, 3, 20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7])
def test_many_steps_agree(operations, seed):
    assert_every_case_was_met(campaign(operations, seed, 150))


def both(operations, make, rows, *, step, ticket=1):
    """Claims of the specification and of the kernels, from the same arena; all arrays equal."""
    arenas = [make() for _ in range(2)]
    splits = [Split.create(query_count=len(rows), top_k=rows.shape[1]) for _ in range(2)]
    claims = [
        one.plan(arena, rows, step=step, ticket=ticket, split=split)
        for one, arena, split in zip((lru, operations), arenas, splits, strict=True)
    ]
    for name in ("slot_of", "row_of", "last_use", "ticket_of", "hit_age"):
        np.testing.assert_array_equal(getattr(arenas[1], name), getattr(arenas[0], name), name)
    for name in ("slots", "hit", "miss", "place", "hit_count", "miss_count", "place_count"):
        np.testing.assert_array_equal(getattr(splits[1], name), getattr(splits[0], name), name)
    for name in Claims.__slots__:
        np.testing.assert_array_equal(getattr(claims[1], name), getattr(claims[0], name), name)
    return claims[0]


def aged_arena(slot_count, *, seed=0, row_count=20_000):
    """Several tiles of slots, full, of random ages, some dirty, some in flight, some free."""
    random = np.random.default_rng(seed)
    arena = Arena.alone(row_count=row_count, slot_count=slot_count)
    arena.row_of[:] = 10_000 + random.permutation(slot_count)
    arena.row_of[random.random(slot_count) < 0.05] = -1
    used = np.flatnonzero(arena.row_of >= 0)
    arena.slot_of[arena.row_of[used]] = used
    arena.last_use[:] = 1000 - random.integers(0, 400, slot_count)
    arena.dirty[used] = random.random(used.size) < 0.1
    arena.ticket_of[used] = (random.random(used.size) < 0.1) * 7
    arena.ticket_of[arena.dirty != 0] = 0
    return arena


@pytest.mark.parametrize("wanted", [1, 100, 3000])
def test_the_oldest_of_several_tiles(operations, wanted):
    rows = np.arange(wanted, dtype=np.int32)[None]
    claims = both(operations, lambda: aged_arena(2048), rows, step=1000, ticket=9)
    assert claims.slots.size == wanted or claims.place_count > 0


def test_hits_alone_touch_the_selection_alone(operations):
    arena = aged_arena(512)
    landed = arena.row_of[(arena.row_of >= 0) & (arena.ticket_of == 0)][:200]
    rows = np.stack([landed, landed[::-1]]).astype(np.int32)
    both(operations, lambda: aged_arena(512), rows, step=1000)
    assert (operations.work["bin_count"] == -77).all(), "slots were counted without need"
    assert (operations.work["claimed_slots"] == -77).all()


def test_a_twin_in_the_same_query_finds_the_slot_of_the_first(operations):
    """What serve reads, assign has written a moment before; thirty schedules."""
    rows = np.tile(np.arange(32, dtype=np.int32)[::-1], 2)[None]
    for _ in range(30):
        claims = both(operations, lambda: aged_arena(64), rows, step=1000)
        assert claims.slots.size == 32


def test_ages_saturate_and_are_counted_once(operations):
    arena = aged_arena(64, seed=5)
    rows = np.tile(arena.row_of[arena.row_of >= 0], (3, 1)).astype(np.int32)
    claims = both(operations, lambda: aged_arena(64, seed=5), rows, step=1300)
    assert claims.hit_count > 64
    arena = aged_arena(64, seed=5)
    lru.plan(arena, rows, step=1300, ticket=1, split=Split.create(query_count=3, top_k=64))
    assert arena.hit_age[AGE_MAX] > 0


def test_positions_are_translated_on_the_way(operations):
    random = np.random.default_rng(2)
    table = ids([[3, 9, 4, 0], [9, 1, -1, -1]])
    positions = random.integers(-1, 128, (3, 50)).astype(np.int32)
    table_row = ids([0, 1, 0])
    rows = np.empty_like(positions)
    lru.translate(positions, table, table_row, ids([256, 128, 256]), out=rows)
    arenas = [Arena.alone(row_count=640, slot_count=128) for _ in range(2)]
    splits = [Split.create(query_count=3, top_k=50) for _ in range(2)]
    lru.plan(arenas[0], rows, step=5, ticket=1, split=splits[0])
    given = {"positions": positions, "page_table": table, "table_row": table_row}
    given |= {"rows": np.full_like(rows, -9), "host_page_of": ids(range(100, 110))}
    claims = operations.plan(arenas[1], rows, step=5, ticket=1, split=splits[1], **given)
    np.testing.assert_array_equal(given["rows"], rows)
    np.testing.assert_array_equal(splits[1].slots, splits[0].slots)
    host_rows = operations.work["claimed_host_rows"][: claims.rows.size]
    np.testing.assert_array_equal(host_rows, claims.rows + 6400)


@pytest.mark.parametrize("wrong", [640, -2, 2**31 - 1])
def test_a_row_that_cannot_be_is_reported_and_left_out(operations, wrong):
    arena = Arena.alone(row_count=640, slot_count=64)
    split = Split.create(query_count=1, top_k=3)
    with pytest.raises(AssertionError):
        operations.plan(arena, ids([[5, wrong, 6]]), step=5, ticket=1, split=split)
    assert operations.report["faults"] == 1
    assert split.slots.tolist()[0][1] == -1
    lru.check(arena, step=5)


def test_a_record_names_what_does_not_fit():
    shape = ResolveShape.of(query_max=4, top_k=16, block_max=2)
    arena, split = Arena.alone(row_count=64, slot_count=64), Split.create(query_count=3, top_k=16)
    given = {"arena": arena, "workspace": {}, "rows": ids([[1]])}
    with pytest.raises(BadInput, match=r"\(3, 16\).*4 queries of 16"):
        resolve_record(shape, split=split, **given)
    with pytest.raises(BadInput, match="page_table"):
        resolve_record(replace(shape, query_max=3), split=split, positions=ids([[1]]), **given)
    with pytest.raises(BadInput, match="0 queries"):
        ResolveShape.of(query_max=0, top_k=16, block_max=2)


def test_small_batches_run_in_one_block():
    small = ResolveShape.of(query_max=4, top_k=2048, block_max=100)
    large = ResolveShape.of(query_max=160, top_k=2048, block_max=16_000)
    assert [small.alone, large.alone] == [True, False]
    assert large.tile_max * large.threads * 8 >= 16_000 * 64
    assert len(NOW) == large.workspace["now"]


def test_the_harness_is_no_friend_of_the_kernels(operations):
    """A plan that forgets one stamp is caught."""
    blind = types.SimpleNamespace(**vars(operations))

    def plan(arena, rows, **options):
        claims = operations.plan(arena, rows, **options)
        arena.last_use[arena.slot_of[rows[0, 0]]] -= 1
        return claims

    blind.plan = plan
    with pytest.raises(AssertionError, match="last_use"):
        both(blind, lambda: aged_arena(64), ids([[1, 2, 3]]), step=1000)
