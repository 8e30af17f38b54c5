"""The residency kernels, on an emulated device, against their specification, bit for bit.

The campaigns are those of the native planner: random requests, shared prefixes, parts of a step,
rows in flight, dirty rows, blocks that change owners. Every call runs on a new schedule.
"""

from __future__ import annotations

import re
import types

import numpy as np
import pytest

from ess.errors import BadInput
from ess.pool.lru import specification
from ess.pool.lru.arena import AGE_MAX, Arena, Split
from ess.pool.lru.cuda import Residency
from ess.pool.lru.cuda_audit import SENTENCES
from ess.pool.lru.cuda_records import moment_record, resolve_record, warm_record
from ess.pool.lru.cuda_shape import NOW, Moment, ResolveShape
from ess.pool.lru.cuda_workspaces import now_of, workspace_sizes
from tests.support.device_residency import DeviceCampaign, Specified, host_pages, host_rows
from tests.support.emulate import needs_compiler
from tests.support.emulated_residency import LINE, Emulated
from tests.support.twins import CLAIMED, assert_every_case_was_met, ids

pytestmark = needs_compiler


def campaign(operations, seed, step_count):
    world = DeviceCampaign(seed, operations)
    for _ in range(step_count):
        world.one_step()
    return world.seen


def test_twenty_steps_agree_with_the_specification(operations):
    campaign(operations, 3, 20)


@pytest.mark.slow
@pytest.mark.parametrize("step_count", [80, pytest.param(150, marks=pytest.mark.long)])
def test_many_steps_agree_with_the_specification(operations, step_count):
    assert_every_case_was_met(campaign(operations, 7, step_count))


NOW_WORDS = now_of(step=1, ticket=2, query_count=0)


def both(operations, make, rows, *, step, ticket=2):
    """Claims of the specification and of the kernels, from the same arena; all arrays equal."""
    splits = [Split.create(query_count=len(rows), top_k=rows.shape[1]) for _ in range(2)]
    plans = [
        lambda arena, one=one, split=split: one.plan(
            arena, rows, step=step, ticket=ticket, split=split
        )
        for one, split in zip((Specified(), operations), splits, strict=True)
    ]
    claims = agree(make, *plans)
    for name in ("slots", "hit", "miss", "place", "hit_count", "miss_count", "place_count"):
        np.testing.assert_array_equal(getattr(splits[1], name), getattr(splits[0], name), name)
    return claims


def agree(make, by_specification, by_kernels):
    arenas = [make() for _ in range(2)]
    claims = by_specification(arenas[0]), by_kernels(arenas[1])
    for name in ("slot_of", "row_of", "last_use", "ticket_of", "dirty", "hit_age"):
        np.testing.assert_array_equal(getattr(arenas[1], name), getattr(arenas[0], name), name)
    for name in CLAIMED:
        np.testing.assert_array_equal(getattr(claims[1], name), getattr(claims[0], name), name)
    return claims[0]


def warmed(operations, make, rows, ages, *, step=1000):
    """As `both`, for a landing."""
    calls = [
        lambda arena, one=one: one.warm(arena, rows, ages, step=step, ticket=9)
        for one in (specification, operations)
    ]
    return agree(make, *calls)


def aged_arena(slot_count, *, seed=0, row_count=20_000, evict="lru"):
    """Several tiles of slots, full, of random ages, some dirty, some in flight, some free."""
    random = np.random.default_rng(seed)
    arena = Arena.alone(row_count=row_count, slot_count=slot_count, evict=evict)
    arena.row_of[:] = 10_000 + random.permutation(slot_count)
    arena.row_of[random.random(slot_count) < 0.05] = -1
    used = np.flatnonzero(arena.row_of >= 0)
    arena.slot_of[arena.row_of[used]] = used
    arena.last_use[:] = 1000 - random.integers(0, 400, slot_count)
    arena.dirty[used] = random.random(used.size) < 0.1
    arena.ticket_of[used] = random.choice([0, 7, 8], used.size, p=[0.9, 0.05, 0.05])
    arena.ticket_of[arena.dirty != 0] = 0
    return arena


@pytest.mark.parametrize("wanted", [1, 100, 3000])
def test_the_oldest_of_several_tiles(operations, wanted):
    rows = np.arange(wanted, dtype=np.int32)[None]
    claims = both(operations, lambda: aged_arena(2048), rows, step=1000, ticket=20)
    assert claims.slots.size == wanted or claims.place_count > 0


@pytest.mark.slow
def test_the_oldest_of_more_tiles_than_a_warp_has_lanes(operations):
    rows = np.arange(1500, dtype=np.int32).reshape(3, 500)
    make = lambda: aged_arena(20_480, row_count=40_000)  # noqa: E731
    claims = both(operations, make, rows, step=1000, ticket=20)
    assert claims.slots.size == 1500


@pytest.mark.slow
@pytest.mark.parametrize("is_together", [False, True])
def test_tiles_of_blocks_wider_than_the_bins(is_together, folder):
    """A thread then clears counts of another tile's that other threads have read."""
    wide = Emulated(folder, is_together=is_together, threads=512)
    rows = np.arange(3000, dtype=np.int32).reshape(2, 1500)
    both(wide, lambda: aged_arena(8192), rows, step=1000, ticket=20)


@pytest.mark.parametrize("age", [1, 150, 254, 255, 256, 400])
def test_a_row_that_warms_takes_what_is_older(operations, age):
    """About half of the rows are there already, some of them dirty or in flight."""
    random = np.random.default_rng(age)
    rows = np.concatenate([np.arange(900), 10_000 + np.arange(700)])
    rows = ids(random.permutation(rows)[:800])
    ages = ids(np.sort(random.integers(max(1, age - 3), age + 1, rows.size)))
    claims = warmed(operations, lambda: aged_arena(1024), rows, ages)
    assert 0 < claims.slots.size < 800
    assert (claims.evicted_count > 0) == (ages[0] < 255)


def test_of_equal_ages_the_first_rows_are_let_in(operations):
    """One slot of age 9 and one of 5, for rows of ages 5, 5 and 8."""
    arena = lambda: Arena.alone(row_count=640, slot_count=64)  # noqa: E731

    def full():
        one = arena()
        specification.fill(one, ids(range(64)), step=300, ticket=3)
        specification.land(one, ids(range(64)), ticket=3)
        one.last_use[:] = 300
        one.last_use[[7, 30]] = 295, 291
        return one

    claims = warmed(operations, full, ids([100, 101, 102]), ids([5, 5, 8]), step=300)
    assert claims.slots.tolist() == [30]
    assert claims.rows.tolist() == [100]


@pytest.mark.parametrize("count", [0, 1, LINE, 5 * LINE + 1])
def test_lists_of_any_length_fill_what_is_free(operations, count):
    rows = ids(np.random.default_rng(count).permutation(20_000)[:count])
    calls = [
        lambda arena, one=one: one.fill(arena, rows, step=1000, ticket=9)
        for one in (specification, operations)
    ]
    claims = agree(lambda: aged_arena(1024), *calls)
    assert claims.evicted_count == 0
    assert claims.slots.size <= count


@pytest.mark.parametrize(
    ("rows", "ages"), [([5, 20_000, 6], [1, 1, 1]), ([5, 6, 7], [3, 2, 3]), ([5, 6, 7], [0, 1, 1])]
)
def test_a_list_that_cannot_be_is_reported(operations, rows, ages):
    arena = aged_arena(64)
    with pytest.raises(AssertionError):
        operations.warm(arena, ids(rows), ids(ages), step=1000, ticket=9)
    assert operations.report["faults"] == 1
    specification.check(arena, step=1000)


def test_a_landing_learns_what_no_copy_may_read(operations):
    stored = np.full((2, 12), 2**64 - 1, np.uint64)
    stored[0, 4] &= ~np.uint64(1 << 9)
    stored[1, [4, 5]] &= ~np.uint64(1 << 63)
    host_page_of = ids([4, 5, *range(6, 14)])
    rows = ids([0, 9, 63, 127, 500])
    arena = Arena.alone(row_count=640, slot_count=128)
    operations.fill(arena, rows, step=5, ticket=3, host_page_of=host_page_of, stored=stored)
    assert operations.report["unwritten"] == 3
    host_rows = operations.work["claimed_host_rows"][: rows.size]
    np.testing.assert_array_equal(host_rows, [256, 265, 319, 383, 11 * 64 + 500 % 64])


def test_blocks_are_cleared_all_or_none(operations):
    arenas = [aged_arena(256) for _ in range(2)]
    for arena in arenas:
        arena.dirty[:128] = arena.ticket_of[:128] = 0
    assert operations.clear_blocks(arenas[0], ids([0, 64]), step=1000)
    assert all(specification.clear_block(arenas[1], block, step=1000) for block in (0, 64))
    assert operations.report["left"] == 128 - (aged_arena(256).row_of[:128] < 0).sum()
    for name in ("slot_of", "row_of", "last_use", "ticket_of", "dirty"):
        np.testing.assert_array_equal(getattr(arenas[0], name), getattr(arenas[1], name), name)
    arenas = [aged_arena(256) for _ in range(2)]
    for arena in arenas:
        arena.dirty[:64] = arena.ticket_of[:128] = 0
        arena.dirty[64:128] = arena.row_of[64:128] >= 0
    assert not operations.clear_blocks(arenas[0], ids([0, 64]), step=1000)
    np.testing.assert_array_equal(arenas[0].row_of, arenas[1].row_of)
    assert not operations.clear_blocks(arenas[0], ids([0]), step=int(arenas[0].last_use[:64].max()))


def test_a_row_named_twice_leaves_once(operations):
    arena = aged_arena(64)
    rows = arena.row_of[arena.row_of >= 0][:20]
    assert operations.drop(arena, np.concatenate([rows, rows, ids([7])])) == 20
    operations.check(arena, step=1000)
    specification.check(arena, step=1000)


@pytest.mark.parametrize(
    ("name", "where", "value", "kind"),
    [
        ("blocks", 1, 32, 0),
        ("blocks", 1, 0, 0),
        ("blocks", 1, 128, 0),
        ("blocks", 0, -64, 0),
        ("row_of", 5, 20_000, 1),
        ("row_of", 5, -2, 1),
        ("row_of", 5, 12_345, 2),
        ("last_use", slice(None), 1001, 3),
        ("ticket_of", slice(None), 3, 4),
        ("dirty", "free", 1, 5),
        ("ticket_of", "free", 1, 5),
        ("ticket_of", "landed", -3, 6),
        ("slot_of", 3, 70, 7),
        ("slot_of", 3, 128, 7),
        ("slot_of", 3, 1000, 7),
        ("slot_of", 3, -5, 7),
    ],
)
def test_an_audit_finds_what_the_specifications_does(operations, name, where, value, kind):
    arena = aged_arena(128)
    landed = (arena.row_of >= 0) & (arena.dirty == 0) & (arena.ticket_of == 0)
    named = {"free": np.flatnonzero(arena.row_of < 0)[0], "landed": np.flatnonzero(landed)[0]}
    operations.check(arena, step=1000)
    getattr(arena, name)[named[where] if isinstance(where, str) else where] = value
    with pytest.raises((AssertionError, IndexError)):
        specification.check(arena, step=1000)
    with pytest.raises(AssertionError, match=re.escape(SENTENCES[kind])):
        operations.check(arena, step=1000)


def test_a_row_in_a_slot_of_another_group_is_missed_by_both_sides(operations):
    arena = aged_arena(128)
    arena.blocks = arena.blocks[:1]
    with pytest.raises(AssertionError, match="rows have slots"):
        operations.check(arena, step=1000)


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
    specification.plan(
        arena, rows, step=1300, ticket=2, split=Split.create(query_count=3, top_k=64)
    )
    assert arena.hit_age[AGE_MAX] > 0


def test_positions_are_translated_on_the_way(operations):
    random = np.random.default_rng(2)
    table = ids([[3, 9, 4, 0], [9, 1, -1, -1]])
    chosen = [np.sort(random.choice(128, 50, replace=False)) for _ in range(3)]
    positions = ids(chosen)
    positions[1, 40:] = -1
    table_row = ids([0, 1, 0])
    rows = np.empty_like(positions)
    specification.translate(positions, table, table_row, ids([256, 128, 256]), out=rows)
    arenas = [Arena.alone(row_count=640, slot_count=128) for _ in range(2)]
    splits = [Split.create(query_count=3, top_k=50) for _ in range(2)]
    specification.plan(arenas[0], rows, step=5, ticket=2, split=splits[0])
    given = {"positions": positions, "page_table": table, "table_row": table_row}
    given |= {"rows": np.full_like(rows, -9), "host_page_of": ids(range(100, 110))}
    claims = operations.plan(arenas[1], rows, step=5, ticket=2, split=splits[1], **given)
    np.testing.assert_array_equal(given["rows"], rows)
    np.testing.assert_array_equal(splits[1].slots, splits[0].slots)
    host_rows = operations.work["claimed_host_rows"][: claims.rows.size]
    np.testing.assert_array_equal(host_rows, claims.rows + 6400)


def test_a_position_beyond_its_context_is_reported(operations):
    arena = Arena.alone(row_count=640, slot_count=128)
    split = Split.create(query_count=2, top_k=2)
    given = {
        "positions": ids([[0, 9], [9, 10]]),
        "page_table": ids([[3]]),
        "table_row": ids([0, 0]),
    }
    given |= {"rows": np.zeros((2, 2), np.int32), "length": ids([10, 10])}
    with pytest.raises(AssertionError):
        operations.plan(arena, given["rows"], step=5, ticket=2, split=split, **given)
    assert operations.report["faults"] == 1
    assert split.slots[1, 1] == -1
    assert split.slots[0, 1] == split.slots[1, 0] >= 0


def test_a_position_beyond_the_page_table_is_reported(operations):
    """In the first query's table row the next word is the second's, in the last there is none."""
    arena = Arena.alone(row_count=640, slot_count=128)
    split = Split.create(query_count=2, top_k=2)
    given = {"positions": ids([[0, 64], [0, 64]]), "page_table": ids([[3], [4]])}
    given |= {"table_row": ids([0, 1]), "rows": np.zeros((2, 2), np.int32)}
    with pytest.raises(AssertionError):
        operations.plan(arena, given["rows"], step=5, ticket=2, split=split, **given)
    assert operations.report["faults"] == 2
    assert (split.slots[:, 1] == -1).all()
    assert (split.slots[:, 0] >= 0).all()


@pytest.mark.parametrize("wrong", [640, -2, 2**31 - 1])
def test_a_row_that_cannot_be_is_reported_and_left_out(operations, wrong):
    arena = Arena.alone(row_count=640, slot_count=64)
    split = Split.create(query_count=1, top_k=3)
    with pytest.raises(AssertionError):
        operations.plan(arena, ids([[5, wrong, 6]]), step=5, ticket=2, split=split)
    assert operations.report["faults"] == 1
    assert split.slots.tolist()[0][1] == -1
    specification.check(arena, step=5)


def test_rows_without_a_slot_are_named_by_host_row(operations):
    """Sixty-four slots for ninety rows: what finds none is read where the page map says."""
    rows = ids(np.random.default_rng(1).permutation(640)[:90].reshape(2, 45))
    arena = Arena.alone(row_count=640, slot_count=64)
    split = Split.create(query_count=2, top_k=45)
    claims = operations.plan(arena, rows, step=300, ticket=2, split=split)
    assert claims.place_count == split.place_count.sum() == 26
    hosts = host_rows(rows, host_pages(640))
    assert (hosts != rows).mean() > 0.5
    placed = arena.slot_of[rows] < 0
    np.testing.assert_array_equal(split.slots[placed], -2 - hosts[placed])
    for query in range(2):
        line = hosts[query][placed[query]]
        np.testing.assert_array_equal(split.place[query, : line.size], line)
    fetched = operations.work["claimed_host_rows"][:64]
    np.testing.assert_array_equal(fetched, host_rows(claims.rows, host_pages(640)))


def test_a_row_of_no_host_page_is_nowhere_and_reported(operations):
    """Not a code that would read as a slot, nor a pair that would be copied."""
    pages = host_pages(640)
    pages[2] = -1
    rows = ids([np.arange(100, 190)])
    arena, split = Arena.alone(row_count=640, slot_count=64), Split.create(query_count=1, top_k=90)
    claims = operations.plan(arena, rows, step=300, ticket=2, split=split, host_page_of=pages)
    lost = (rows[0] >= 128) & (rows[0] < 192)
    assert operations.report["unwritten"] == lost.sum()
    slots = arena.slot_of[rows[0]]
    expected = np.where(slots >= 0, slots, np.where(lost, -1, -2))
    np.testing.assert_array_equal(np.maximum(split.slots[0], -2), expected)
    sources = operations.work["claimed_host_rows"][: claims.slots.size]
    np.testing.assert_array_equal(sources < 0, (claims.rows >= 128) & (claims.rows < 192))


def test_a_record_names_what_does_not_fit():
    shape = ResolveShape.of(query_max=4, top_k=16, block_max=2)
    arena, split = Arena.alone(row_count=64, slot_count=64), Split.create(query_count=3, top_k=16)
    given = {"arena": arena, "workspace": {"now": ids(NOW_WORDS)}, "host_page_of": ids([0])}
    rows = np.zeros((4, 16), np.int32)
    with pytest.raises(BadInput, match=r"\(3, 16\).*4 queries of 16"):
        resolve_record(shape, split=split, rows=rows, **given)
    with pytest.raises(BadInput, match=r"\(5, 16\).*16 wide.*4 lines"):
        resolve_record(shape, split=split, rows=np.zeros((5, 16), np.int32), **given)
    with pytest.raises(BadInput, match="host_page_of"):
        resolve_record(shape, split=split, rows=rows[:3], **given | {"host_page_of": None})
    with pytest.raises(BadInput, match=r"\(65,\).*room for 64"):
        warm_record(shape, arena=arena, workspace={}, rows=ids(range(65)))
    with pytest.raises(BadInput, match=r"\(3,\) and \(2,\)"):
        warm_record(shape, arena=arena, workspace={}, rows=ids([1, 2, 3]), ages=ids([1, 1]))
    with pytest.raises(BadInput, match="0 queries"):
        ResolveShape.of(query_max=0, top_k=16, block_max=2)
    with pytest.raises(AssertionError, match="its own copy"):
        moment_record(given["workspace"], Moment(waited=1))


def test_small_batches_run_in_one_cluster_and_others_on_the_whole_device():
    small = ResolveShape.of(query_max=4, top_k=2048, block_max=100)
    middle = ResolveShape.of(query_max=16, top_k=2048, block_max=1600)
    large = ResolveShape.of(query_max=160, top_k=2048, block_max=16_000)
    shapes = small, middle, large
    assert [shape.is_together for shape in shapes] == [True, False, False]
    assert [len(shape.launches(2)) for shape in shapes] == [1, 5, 5]
    assert small.launches(2)[0].blocks == 8
    assert [one.blocks for one in middle.launches(2)] == [8, 25 + 8, 25, 8, 2]
    assert large.tile_max * large.threads * 8 >= 16_000 * 64


def test_a_device_without_clusters_takes_a_launch_for_each_phase():
    arena = types.SimpleNamespace(row_of=np.zeros(64), rank_of=None)
    for has_clusters, count in ((True, 1), (False, 5)):
        loaded = []
        device = types.SimpleNamespace(
            has_clusters=has_clusters,
            kernel=lambda program, entry, seen=loaded: seen.append(entry),
        )
        shape = ResolveShape.of(query_max=2, top_k=16, block_max=1)
        residency = Residency(device, arena, types.SimpleNamespace(shape=shape))
        assert len(residency.shape.launches(2)) == count
        assert ("ess_resolve_together" in loaded) == (count == 1)


def test_groups_share_what_calls_work_in():
    """As many claims as a ring has places, one scratch and one `now`, however many groups."""
    shape = ResolveShape.of(query_max=320, top_k=2048, block_max=16_000)
    of_one = workspace_sizes(shape, group_count=1, part_max=2, ring=2)
    of_all = workspace_sizes(shape, group_count=62, part_max=2, ring=2)
    assert sum(of_all.values()) - sum(of_one.values()) == 2 * 61 * 12
    assert 4 * sum(of_all.values()) < 12 << 20
    assert of_all["now"] == len(NOW_WORDS) == len(NOW)
    assert of_all["claimed_slots"] == 2 * 320 * 2048


def test_the_harness_finds_a_plan_that_forgets_a_stamp(operations):
    """A plan that forgets one stamp is caught."""
    blind = types.SimpleNamespace(**vars(operations))

    def plan(arena, rows, **options):
        claims = operations.plan(arena, rows, **options)
        arena.last_use[arena.slot_of[rows[0, 0]]] -= 1
        return claims

    blind.plan = plan
    with pytest.raises(AssertionError, match="last_use"):
        both(blind, lambda: aged_arena(64), ids([[1, 2, 3]]), step=1000)
