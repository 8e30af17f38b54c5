from __future__ import annotations

import numpy as np
import pytest

from ess.layout import ModelLayout, RowCodec
from ess.pool.capacity import even_chunks, share_out
from ess.pool.lru.arena import Lookup, Split
from ess.pool.lru.eviction import POLICIES, PolicyName
from ess.pool.sparse import FIRST_STEP, NOW_MAX, SparsePool

GROUPED = ModelLayout(
    name="t",
    layer_count=7,
    groups=((0,), (1, 2, 3, 4), (5, 6)),
    row=RowCodec(form="opaque", opaque_bytes=8),
    index=None,
    top_k=8,
)
ROW_IDS = 256


def pool(chunks: int = 5, poison: bool = False, evict: PolicyName = "lru") -> SparsePool:
    memory = np.zeros(chunks * 4 * 64 * 8, np.uint8)
    return SparsePool(GROUPED, memory, row_id_count=ROW_IDS, poison=poison, evict=evict)


def ids(*rows: int) -> np.ndarray:
    return np.array(rows, np.int32)


def select(sparse: SparsePool, group: int, *rows: int):
    split = Split.create(query_count=1, top_k=8)
    line = np.full((1, 8), -1, np.int32)
    line[0, : len(rows)] = rows
    return sparse.plan(group, line, split), split


def claim_new(sparse: SparsePool, group: int, rows: np.ndarray) -> np.ndarray | None:
    slots = np.empty((1, len(rows)), np.int32)
    return slots[0] if sparse.claim_new(range(group, group + 1), rows, out=slots) else None


def test_groups_get_about_the_same_number_of_slots():
    counts = even_chunks(GROUPED, 100)
    slots = [count * each for count, each in zip(counts, [4, 1, 2], strict=True)]
    assert max(slots) - min(slots) <= 4
    assert sum(counts) == 100


def test_shares_are_whole_at_least_one_and_all_given_out():
    for count in range(3, 40):
        shares = share_out(np.array([0.25, 1.0, 0.5]), count)
        assert sum(shares) == count
        assert min(shares) >= 1
    assert share_out(np.array([1.0, 1.0]), 7) == [4, 3]
    assert share_out(np.array([0.0, 1.0]), 6) == [1, 5]


def test_blocks_of_a_group_leave_room_for_its_layers():
    sparse = pool(3)
    assert [sparse.slot_count(g) for g in range(3)] == [256, 64, 128]
    sparse.begin_step()
    plans = [select(sparse, group, 1, 2)[0] for group in range(3)]
    assert [plan.slots.tolist() for plan in plans] == [[0, 1], [256, 257], [512, 513]]
    for plan in plans:
        sparse.commit(plan)
    many = np.arange(100, 200, dtype=np.int32)
    slots = claim_new(sparse, 2, many[:100])
    assert slots is not None
    assert set(slots.tolist()) == set(range(514, 576)) | set(range(640, 678))
    sparse.check()


def test_a_plan_is_in_flight_until_it_is_committed():
    sparse = pool()
    sparse.begin_step()
    plan, split = select(sparse, 0, 3, 4)
    assert plan.is_pending
    assert split.miss_count[0] == 2
    again, split = select(sparse, 0, 4, 5)
    assert (again.late_ticket, again.rows.tolist()) == (plan.ticket, [5])
    assert split.miss_count[0] == 2
    late, _ = select(sparse, 0, 4)
    assert late.is_pending
    assert len(late.rows) == 0
    sparse.commit(plan)
    hit, split = select(sparse, 0, 3, 4)
    assert not hit.is_pending
    assert (hit.hit_count, split.hit_count[0], split.miss_count[0]) == (2, 2, 0)
    sparse.commit(again)
    sparse.check()


def test_plans_own_their_arrays():
    sparse = pool()
    sparse.begin_step()
    first, _ = select(sparse, 0, 1)
    second, _ = select(sparse, 1, 9)
    assert (first.rows.tolist(), second.rows.tolist()) == ([1], [9])


def test_used_slots_are_counted_through_every_change():
    sparse = pool(3)
    sparse.begin_step()
    assert sparse.step == FIRST_STEP + 1
    sparse.commit(select(sparse, 1, 1, 2, 3)[0])
    assert sparse.used_count(1) == 3
    claim_new(sparse, 1, ids(3, 10, 11))
    assert sparse.used_count(1) == 5
    sparse.drop([1], ids(3, 99))
    assert sparse.used_count(1) == 4
    sparse.commit(sparse.fill(1, np.arange(100, 180, dtype=np.int32)))
    assert sparse.used_count(1) == 64, "all slots are taken, and no row gave way"
    sparse.begin_step()
    plan, _ = select(sparse, 1, 200, 201)
    assert (plan.evicted_count, sparse.used_count(1)) == (2, 64)
    assert sparse.used_count(0) == sparse.used_count(2) == 0
    sparse.commit(plan)
    sparse.check()
    sparse.drop_pages(ids(0, 1, 2, 3))
    assert sparse.used_count(1) == 0
    sparse.check()


def test_new_rows_that_find_no_slot_change_nothing():
    sparse = pool(3)
    sparse.begin_step()
    assert claim_new(sparse, 1, np.arange(64, dtype=np.int32)) is not None
    assert claim_new(sparse, 1, ids(64)) is None
    assert sparse.used_count(1) == 64
    sparse.check()


def test_claimed_slots_are_poisoned_in_every_layer_of_the_group():
    sparse = pool(3, poison=True)
    sparse.slots_of(0).fill(0)
    sparse.begin_step()
    slots = claim_new(sparse, 2, ids(7))
    assert slots is not None
    touched = np.flatnonzero((sparse.slots_of(0) == 0xFF).all(axis=1))
    assert touched.tolist() == [int(slots[0]), int(slots[0]) + 64]


def test_a_settled_slot_may_give_way_a_dirty_one_not():
    sparse = pool(3)
    sparse.begin_step()
    slots = claim_new(sparse, 1, np.arange(64, dtype=np.int32))
    sparse.begin_step()
    plan, split = select(sparse, 1, 100)
    assert (plan.place_count, split.place[0, 0], len(plan.rows)) == (1, 100, 0)
    sparse.settle(slots[5:6])
    plan, _ = select(sparse, 1, 100)
    assert plan.slots.tolist() == slots[5:6].tolist()


def test_a_budget_moves_with_its_chunk_and_leaves_one_behind():
    sparse = pool(5)
    counts = sparse.chunks.counts()
    assert sum(counts) == 5
    giver = int(np.argmax(counts))
    taker = (giver + 1) % 3
    sparse.begin_step()
    slots = np.arange(sparse.slot_count(giver), dtype=np.int32)[:ROW_IDS]
    sparse.commit(sparse.fill(giver, slots))
    used = sparse.used_count(giver)
    sparse.begin_step()
    assert sparse.move_chunks(giver, taker)
    assert sparse.used_count(giver) < used
    assert sparse.chunks.counts()[giver] == counts[giver] - 1
    assert sparse.chunks.counts()[taker] == counts[taker] + 1
    sparse.check()
    while sparse.chunks.counts()[giver] > 1:
        assert sparse.move_chunks(giver, taker)
    assert not sparse.move_chunks(giver, taker)
    other = ({0, 1, 2} - {giver, taker}).pop()
    while sparse.move_chunks(other, taker):
        assert sparse.chunks.counts()[taker] <= sparse.chunks.most(taker)
    assert sparse.chunks.counts()[taker] == sparse.chunks.most(taker) == 5 - 2
    sparse.check()


@pytest.mark.parametrize("held", ["selected", "dirty", "in flight"])
def test_a_chunk_in_use_does_not_move(held):
    sparse = pool(4)
    giver = int(np.argmax(sparse.chunks.counts()))
    assert sparse.chunks.counts()[giver] == 2
    count = sparse.slot_count(giver)
    rows = np.arange(count, dtype=np.int32)
    sparse.begin_step()
    if held == "dirty":
        assert claim_new(sparse, giver, rows) is not None
        sparse.begin_step()
    else:
        plan = sparse.fill(giver, rows)
        if held == "selected":
            sparse.commit(plan)
            sparse.begin_step()
            last = [int(rows[-1])]
            sparse.commit(select(sparse, giver, *last)[0])
            assert sparse.used_count(giver) == count
    assert not sparse.move_chunks(giver, (giver + 1) % 3)
    assert sparse.used_count(giver) == count
    sparse.check()


def test_tickets_start_over_when_none_is_in_flight(monkeypatch):
    monkeypatch.setattr("ess.pool.sparse.TICKET_MAX", 3)
    sparse = pool()
    sparse.begin_step()
    plans = [select(sparse, 0, row)[0] for row in range(5)]
    assert [plan.ticket for plan in plans] == [1, 2, 3, 4, 5]
    sparse.begin_step()
    assert select(sparse, 0, 90)[0].ticket == 6, "copies are in flight"
    for plan in [*plans, sparse.fill(1, ids(1))]:
        sparse.commit(plan)
    sparse.drop([0], ids(90))
    sparse.begin_step()
    assert select(sparse, 0, 91)[0].ticket == 1


def test_hit_ages_are_counted():
    sparse = pool()
    sparse.begin_step()
    sparse.commit(select(sparse, 0, 1)[0])
    for _ in range(3):
        sparse.begin_step()
    select(sparse, 0, 1)
    ages = sparse.hit_age(0)
    assert ages[3] == 1
    assert ages.sum() == 1
    ages[:] = 0
    assert sparse.hit_age(0).sum() == 1, "readers get a copy"


def test_a_row_is_located_when_it_has_landed():
    sparse = pool()
    sparse.begin_step()
    plan, _ = select(sparse, 0, 0, 4, ROW_IDS - 1)
    asked = ids(0, 4, ROW_IDS - 1, 9, -1)
    assert sparse.locate(0, asked).tolist() == [-1] * 5
    assert sparse.copies(0)[1].tolist() == []
    sparse.commit(plan)
    assert sparse.locate(0, asked).tolist() == [*plan.slots.tolist(), -1, -1]
    claim_new(sparse, 0, ids(4))
    assert sparse.copies(0)[1].tolist() == [0, ROW_IDS - 1], "4 is newer than the host's row"


def test_under_score_the_row_of_the_lowest_logit_gives_way():
    sparse = pool(3, evict="score")
    sparse.begin_step()
    sparse.commit(sparse.fill(1, np.arange(64, dtype=np.int32)))
    none = np.zeros((1, 1), np.int32)
    lookup = Lookup(
        lines=ids(0, 1, 2, 3)[None],
        host_page_of=none[0],
        stored=np.zeros((1, 1), np.uint64),
        rows=none,
        host_rows=none[0],
    )
    logits = np.linspace(1, 2, ROW_IDS, dtype=np.float32)[None]
    logits[0, 40] = 0
    sparse.observe(1, lookup, ids(63, 255)[None], ids(0), ids(ROW_IDS), logits)
    sparse.begin_step()
    select(sparse, 1, 100)
    assert sparse.locate(1, ids(40)).tolist() == [-1]


def test_resident_rows_are_counted_by_their_age_in_the_next_step():
    sparse = pool()
    for rows in ((0, 1), (2,)):
        assert sparse.begin_step() == sparse.step
        sparse.commit(select(sparse, 0, *rows)[0])
    assert {int(age): int(sparse.resident_age(0)[age]) for age in (1, 2)} == {1: 1, 2: 2}
    assert sparse.resident_age(0).sum() == 3
    sparse.step += 255
    assert sparse.resident_age(0)[-1] == 3
    assert sparse.resident_age(0).size == 256


def test_rows_that_give_way_or_leave_with_a_page_have_departed_rejected_ones_have_not():
    sparse = pool(3)
    sparse.begin_step()
    sparse.commit(sparse.fill(1, np.arange(100, 162, dtype=np.int32)))
    assert sparse.departed_count == 0
    slots = claim_new(sparse, 1, ids(1, 2, 3))
    assert sparse.departed_count == 1
    assert sparse.is_dirty(slots).all()
    sparse.drop([1], ids(1))
    assert sparse.departed_count == 1
    sparse.settle(slots[1:])
    assert not sparse.is_dirty(slots).any()
    sparse.commit(select(sparse, 1, 200, 201)[0])
    assert sparse.departed_count == 2
    sparse.drop_pages(ids(0))
    assert sparse.departed_count == 4
    sparse.check()


@pytest.mark.parametrize("evict", POLICIES)
def test_names_of_steps_begin_anew_and_nothing_else_changes(
    evict: PolicyName, monkeypatch: pytest.MonkeyPatch
):
    """One pool is far from the end of its names; the other's are few, or reach it at once."""
    for few in (FIRST_STEP + 3, FIRST_STEP + 300, NOW_MAX):
        long, short = pool(3, evict=evict), pool(3, evict=evict)
        short.step += few - FIRST_STEP - 2
        behind = short.step - long.step
        random = np.random.default_rng(few)
        for turn in range(700):
            for each, names in ((long, NOW_MAX), (short, few)):
                monkeypatch.setattr("ess.pool.sparse.NOW_MAX", names)
                each.begin_step()
            count = 1 if turn % 300 < 270 else 8
            rows = np.sort(random.choice(ROW_IDS, count, replace=False)).tolist()
            plans = [select(each, 1, *rows)[0] for each in (long, short)]
            assert np.array_equal(plans[0].slots, plans[1].slots)
            for each, plan in zip((long, short), plans, strict=True):
                each.commit(plan)
            assert np.array_equal(long.resident_age(1), short.resident_age(1))
        assert np.array_equal(long.slot_of, short.slot_of)
        assert np.array_equal(long.hit_age(1), short.hit_age(1))
        assert short.step - long.step == behind
        assert short.now <= few < 1 << 31
        short.check()
