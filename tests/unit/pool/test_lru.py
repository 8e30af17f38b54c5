"""Every rule of the residency specification by hand, then all of it against a dictionary."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ess.errors import BadInput
from ess.pool.lru import specification
from ess.pool.lru.arena import Arena, Split


def ids(*values):
    return np.array(values, np.int32)


def arena_with(*, slot_count=64, used=(), step=0):
    """`used`: (row, slot, last use)."""
    arena = Arena.alone(row_count=256, slot_count=slot_count)
    for row, slot, last_use in used:
        arena.slot_of[row], arena.row_of[slot], arena.last_use[slot] = slot, row, last_use
    specification.check(arena, step=step)
    return arena


def full_arena(*, last_use=10):
    """Row 100 + s in slot s, all of one age."""
    return arena_with(used=[(100 + s, s, last_use) for s in range(64)], step=last_use)


def plan(arena, *queries, step, ticket=7, split=None):
    split = split or Split.create(query_count=len(queries), top_k=len(queries[0]))
    rows = np.array(queries, np.int32)
    claims = specification.plan(arena, rows, step=step, ticket=ticket, split=split)
    specification.check(arena, step=step)
    return claims, split


def state(arena):
    names = ("slot_of", "row_of", "last_use", "ticket_of", "dirty", "hit_age")
    return {name: getattr(arena, name).tolist() for name in names}


def test_hits_are_stamped_and_counted_once_per_step_at_the_age_they_had():
    arena = arena_with(used=[(5, 0, 8), (6, 1, 8), (7, 2, 1)], step=8)
    _, split = plan(arena, [5, 6, 5], [5, 7, -1], step=10)
    assert arena.last_use[:3].tolist() == [10, 10, 10]
    assert {age: int(n) for age, n in enumerate(arena.hit_age) if n} == {2: 2, 9: 1}
    assert split.hit.tolist() == [[0, 1, 0], [0, 2, -1]]
    plan(arena, [5, 6, 7], step=10)
    assert arena.hit_age.sum() == 3, "age 0 is not counted again"
    plan(arena, [5, 6, 7], step=9_000)
    assert arena.hit_age[255] == 3, "ages saturate"


def test_missing_rows_take_victims_in_the_order_of_first_occurrence():
    arena = arena_with(used=[(5, 1, 0)])
    claims, split = plan(arena, [9, 5, 4, 9], [4, -1, 8, 5], step=3)
    assert claims.rows.tolist() == [9, 4, 8]
    assert claims.slots.tolist() == [0, 2, 3], "free slots, ascending"
    assert split.slots.tolist() == [[0, 1, 2, 0], [2, -1, 3, 1]]
    assert split.miss.tolist() == [[0, 2, 0, -1], [2, 3, -1, -1]]
    assert split.hit.tolist() == [[1, -1, -1, -1], [1, -1, -1, -1]]
    assert (split.hit_count.tolist(), split.miss_count.tolist()) == ([1, 1], [3, 2])
    assert (claims.hit_count, claims.place_count, claims.evicted_count) == (2, 0, 0)
    assert arena.ticket_of[claims.slots].tolist() == [7, 7, 7]
    assert arena.last_use[claims.slots].tolist() == [3, 3, 3]


def test_victims_go_by_age_then_by_slot_and_free_ones_first():
    arena = full_arena(last_use=300)
    arena.last_use[[9, 20, 30, 40]] = [
        100,
        5,
        30,
        5,
    ]  # at 310: 210, saturated, saturated, saturated
    specification.drop(arena, ids(150))
    claims, _ = plan(arena, [1, 2, 3, 4, 5, 6], step=310)
    assert claims.slots.tolist() == [50, 20, 30, 40, 9, 0]
    assert claims.evicted_count == 5
    assert arena.slot_of[[120, 130, 140, 109, 100]].tolist() == [-1] * 5
    assert arena.slot_of[1:7].tolist() == claims.slots.tolist()


def test_a_row_selected_by_any_query_of_the_call_is_no_victim():
    arena = full_arena()
    arena.last_use[0] = 1
    claims, _ = plan(arena, [1, -1], [100, -1], step=11)
    assert claims.slots.tolist() == [1]


def test_a_row_selected_by_an_earlier_part_of_the_step_is_no_victim():
    arena = full_arena()
    arena.last_use[0] = 1
    plan(arena, [100], step=11)
    assert plan(arena, [1], step=11, ticket=8)[0].slots.tolist() == [1]
    assert plan(arena, [2], step=11, ticket=9)[0].slots.tolist() == [2], "claimed is selected"


def test_dirty_and_in_flight_slots_are_no_victims():
    arena = full_arena()
    arena.dirty[0], arena.ticket_of[1] = 1, 3
    assert plan(arena, [1], step=11)[0].slots.tolist() == [2]


def test_rows_without_a_victim_are_served_in_place():
    arena = full_arena(last_use=11)
    arena.last_use[4] = 10
    claims, split = plan(arena, [7, 8, 110, 9], [9, 7, -1, -1], step=11)
    assert (claims.slots.tolist(), claims.rows.tolist()) == ([4], [7])
    assert split.slots.tolist() == [[4, -10, 10, -11], [-11, 4, -1, -1]]
    assert split.place.tolist() == [[8, 9, -1, -1], [9, -1, -1, -1]]
    assert (split.place_count.tolist(), claims.place_count) == ([2, 1], 3)
    assert arena.slot_of[[8, 9]].tolist() == [-1, -1]


def test_a_row_in_flight_is_late_not_fetched_again_and_protected_once_landed():
    arena = full_arena()
    specification.drop(arena, ids(100))
    first, _ = plan(arena, [1], step=11, ticket=21)
    claims, split = plan(arena, [1, 105], step=12, ticket=22)
    assert (claims.slots.size, claims.late_ticket) == (0, 21)
    assert (split.miss.tolist(), split.hit.tolist()) == ([[0, -1]], [[5, -1]])
    specification.land(arena, first.slots, ticket=21)
    assert arena.last_use[0] == 12, "late is selected too"
    assert arena.hit_age[1] == 0, "a late row is no hit"
    assert plan(arena, [1], step=12, ticket=23)[0].late_ticket == 0


def test_only_the_top_left_of_a_larger_split_is_written():
    split = Split.create(query_count=3, top_k=4)
    names = ("slots", "hit", "miss", "place", "hit_count", "miss_count", "place_count")
    for name in names:
        getattr(split, name)[:] = 77
    plan(arena_with(used=[(5, 0, 0)]), [5, 6], [-1, -1], step=1, split=split)
    assert split.slots.tolist() == [[0, 1, 77, 77], [-1, -1, 77, 77], [77] * 4]
    assert split.hit.tolist() == [[0, -1, 77, 77], [-1, -1, 77, 77], [77] * 4]
    assert split.place.tolist() == [[-1, -1, 77, 77], [-1, -1, 77, 77], [77] * 4]
    assert split.miss_count.tolist() == [1, 0, 77]


@pytest.mark.parametrize(
    ("rows", "ticket", "sentence"),
    [
        ([[256]], 1, "row ids"),
        ([[-2]], 1, "row ids"),
        ([[1]], 0, "ticket"),
        ([[1] * 9], 1, "split"),
    ],
)
def test_a_plan_refuses_what_it_cannot_mean(rows, ticket, sentence):
    arena, split = full_arena(), Split.create(query_count=1, top_k=8)
    before = state(arena)
    with pytest.raises(AssertionError, match=sentence):
        specification.plan(arena, np.array(rows, np.int32), step=11, ticket=ticket, split=split)
    assert state(arena) == before


def test_translate_goes_through_the_page_table():
    table = np.array([[3, -1, -1], [5, 0, 9]], np.int32)
    selection = np.array([[0, 63, -1], [64, 128, 190]], np.int32)
    out = np.zeros_like(selection)
    specification.translate(selection, table, ids(0, 1), ids(64, 191), out=out)
    assert out.tolist() == [[192, 255, -1], [0, 576, 638]]


def test_translate_refuses_position_0_too_when_its_page_has_no_id():
    out = np.zeros((1, 1), np.int32)
    with pytest.raises(BadInput, match="position 0, which lies in a page without an id"):
        specification.translate(np.array([[0]], np.int32), ids(-1)[None], ids(0), ids(64), out=out)


@pytest.mark.parametrize(
    ("position", "sentence"),
    [
        (-2, r"selection\[1, 2\] is position -2, which is outside its context of 130 tokens"),
        (130, r"selection\[1, 2\] is position 130, which is outside its context of 130 tokens"),
        (64, r"selection\[1, 2\] is position 64, which lies in a page without an id of 130 tok"),
    ],
)
def test_translate_names_what_it_refuses_and_writes_nothing(position, sentence):
    table = np.array([[5, -1, 9]], np.int32)
    selection = np.array([[0, 1, 2], [0, 128, position]], np.int32)
    out = np.full_like(selection, 77)
    with pytest.raises(BadInput, match=sentence):
        specification.translate(selection, table, ids(0, 0), ids(130, 130), out=out)
    assert (out == 77).all()


def test_new_rows_keep_their_slot_or_take_a_victim_and_are_dirty():
    arena = full_arena()
    arena.last_use[0] = 1
    out = ids(0, 0, 0)
    assert specification.claim_new(arena, ids(1, 100, 2), step=11, out=out)
    assert out.tolist() == [1, 0, 2], "row 100 is stamped before victims are sought"
    assert arena.dirty.nonzero()[0].tolist() == [0, 1, 2]
    assert arena.ticket_of[out].tolist() == [0, 0, 0]
    assert arena.last_use[out].tolist() == [11, 11, 11]
    assert arena.hit_age.sum() == 0
    specification.check(arena, step=11)


def test_new_rows_find_room_for_all_or_nothing_changes():
    arena = full_arena(last_use=11)
    arena.last_use[[3, 4]] = 5
    before, out = state(arena), ids(77, 77, 77)
    assert not specification.claim_new(arena, ids(1, 104, 2), step=11, out=out)
    assert (state(arena), out.tolist()) == (before, [77, 77, 77])


def test_a_row_that_is_being_fetched_or_named_twice_is_not_written():
    arena = full_arena()
    arena.ticket_of[0] = 9
    with pytest.raises(AssertionError, match="being fetched"):
        specification.claim_new(arena, ids(100), step=11, out=ids(0))
    with pytest.raises(AssertionError, match="twice"):
        specification.claim_new(arena, ids(1, 1), step=11, out=ids(0, 0))


def test_fill_takes_free_slots_only_and_ranks_as_the_oldest_used():
    arena = full_arena(last_use=300)
    specification.drop(arena, ids(103, 101))
    claims = specification.fill(arena, ids(105, 1, 2, 3), step=310, ticket=4)
    assert (claims.slots.tolist(), claims.rows.tolist()) == ([1, 3], [1, 2])
    assert arena.last_use[[1, 3, 5]].tolist() == [55, 55, 300]
    assert arena.ticket_of[[1, 3]].tolist() == [4, 4]
    specification.land(arena, claims.slots, ticket=4)
    assert plan(arena, [9, 10, 11], step=311)[0].slots.tolist() == [1, 3, 0]


def test_warm_stamps_residents_and_evicts_only_what_is_older():
    arena = full_arena(last_use=290)  # age 10 at step 300
    arena.last_use[[8, 9]] = [280, 281]
    claims = specification.warm(
        arena, ids(1, 108, 110, 2, 3, 111), ids(1, 5, 15, 18, 19, 300), step=300, ticket=4
    )
    assert (claims.slots.tolist(), claims.rows.tolist()) == ([9], [1]), (
        "row 2 (18) would evict a 10"
    )
    assert arena.last_use[[8, 9, 10, 11]].tolist() == [295, 299, 290, 290]
    assert (claims.evicted_count, int(arena.ticket_of[9])) == (1, 4)


def test_warm_refuses_an_equal_and_then_all_that_follow():
    arena = full_arena(last_use=290)
    specification.drop(arena, ids(107))
    arena.last_use[[8, 9]] = [280, 281]
    claims = specification.warm(arena, ids(1, 2, 3, 4), ids(1, 19, 19, 19), step=300, ticket=4)
    assert (claims.slots.tolist(), claims.rows.tolist()) == ([7, 8], [1, 2])
    assert arena.last_use[[7, 8]].tolist() == [299, 281]


def test_warm_beyond_saturation_takes_free_slots_only():
    arena = full_arena(last_use=0)
    specification.drop(arena, ids(107))
    claims = specification.warm(arena, ids(1, 2), ids(400, 400), step=1000, ticket=4)
    assert (claims.slots.tolist(), int(arena.last_use[7])) == ([7], 600)


@pytest.mark.parametrize("ages", [(0, 1), (2, 1)])
def test_warm_refuses_ages_that_do_not_ascend_from_one(ages):
    with pytest.raises(AssertionError, match="ages must ascend"):
        specification.warm(full_arena(), ids(1, 2), ids(*ages), step=20, ticket=1)


def test_land_clears_only_its_own_ticket():
    arena = full_arena()
    arena.ticket_of[:3] = [4, 5, 4]
    specification.land(arena, ids(0, 1, 9), ticket=4)
    assert arena.ticket_of[:3].tolist() == [0, 5, 4]


def test_settle_cleans_used_slots_only():
    arena = full_arena()
    arena.dirty[:3] = 1
    specification.settle(arena, ids(0, 2))
    assert arena.dirty[:3].tolist() == [0, 1, 0]
    specification.drop(arena, ids(101))
    with pytest.raises(AssertionError, match="free slot"):
        specification.settle(arena, ids(1))


def test_drop_forgets_a_row_whatever_its_state_and_ignores_the_absent():
    arena = full_arena()
    arena.dirty[0], arena.ticket_of[1] = 1, 9
    assert specification.drop(arena, np.arange(64, 128, dtype=np.int32)) == 28
    specification.check(arena, step=11)
    assert (arena.row_of[:28] == -1).all()
    assert not arena.dirty.any()
    assert not arena.ticket_of.any()
    assert specification.drop(arena, np.arange(64, 128, dtype=np.int32)) == 0


@pytest.mark.parametrize("held", ["dirty", "in flight", "selected"])
def test_a_block_is_cleared_only_when_nothing_holds_it(held):
    arena = arena_with(slot_count=128, used=[(r, r, 5) for r in range(60, 70)], step=5)
    name, value = {
        "dirty": ("dirty", 1),
        "in flight": ("ticket_of", 3),
        "selected": ("last_use", 6),
    }[held]
    before = getattr(arena, name)[66]
    getattr(arena, name)[66] = value
    unchanged = state(arena)
    assert not specification.clear_block(arena, 64, step=6)
    assert state(arena) == unchanged
    getattr(arena, name)[66] = before
    assert specification.clear_block(arena, 64, step=6)
    assert arena.slot_of[60:70].tolist() == [60, 61, 62, 63] + [-1] * 6
    specification.check(arena, step=6)


@pytest.mark.parametrize(
    ("name", "at", "value", "sentence"),
    [
        ("slot_of", 100, 5, "(0 holds|100 .a row.)"),
        ("slot_of", 7, 63, "7 .a row. has a slot that holds another"),
        ("slot_of", 7, 64, "7 .a row. has a slot that the group does not own"),
        ("row_of", 3, -1, "103 .a row."),
        ("row_of", 3, 900, "3 holds an impossible row id"),
        ("last_use", 3, 12, "3 was last used after step 11"),
        ("ticket_of", 3, -4, "3 has a negative ticket"),
    ],
)
def test_check_names_what_is_wrong(name, at, value, sentence):
    arena = full_arena()
    arena = Arena(
        slot_of=arena.slot_of,
        row_of=np.append(arena.row_of, np.full(64, -1, np.int32)),
        last_use=np.append(arena.last_use, ids(*[0] * 64)),
        ticket_of=np.append(arena.ticket_of, ids(*[0] * 64)),
        dirty=np.append(arena.dirty, np.zeros(64, np.uint8)),
        blocks=ids(0),
        hit_age=arena.hit_age,
    )
    specification.check(arena, step=11)
    getattr(arena, name)[at] = value
    with pytest.raises(AssertionError, match=sentence):
        specification.check(arena, step=11)


def test_check_knows_states_that_exclude_each_other():
    arena = full_arena()
    arena.dirty[3] = arena.ticket_of[3] = 1
    with pytest.raises(AssertionError, match="3 is dirty and in flight"):
        specification.check(arena, step=11)
    arena = Arena.alone(row_count=9, slot_count=64)
    arena.dirty[5] = 1
    with pytest.raises(AssertionError, match="5 is free but dirty or in flight"):
        specification.check(arena, step=11)
    arena.blocks = ids(32)
    with pytest.raises(AssertionError, match="multiple of 64"):
        specification.check(arena, step=11)


class Oracle:
    """The rules again, with dictionaries and sorted(): rows are looked at one by one."""

    def __init__(self, slot_count):
        self.slots = range(slot_count)
        self.row, self.slot, self.use, self.ticket, self.dirty = {}, {}, {}, {}, set()

    def victims(self, step):
        def age(slot):
            return min(step - self.use[slot], 255) if slot in self.row else 256

        free_to_go = [
            s
            for s in self.slots
            if s not in self.row or (age(s) and s not in self.dirty and not self.ticket[s])
        ]
        return sorted(free_to_go, key=lambda slot: (-age(slot), slot))

    def give(self, slot, row, step, ticket):
        if slot in self.row:
            del self.slot[self.row[slot]]
        self.row[slot], self.slot[row], self.use[slot], self.ticket[slot] = row, slot, step, ticket

    def plan(self, queries, step, ticket):
        known = dict(self.slot)
        for row in known.keys() & {row for query in queries for row in query}:
            self.use[known[row]] = step
        landed = {row for row in known if not self.ticket[known[row]]}
        missing = dict.fromkeys(r for query in queries for r in query if r >= 0 and r not in known)
        fetched = list(zip(missing, self.victims(step), strict=False))
        for row, slot in fetched:
            self.give(slot, row, step, ticket)
        kinds = {"hit": [], "miss": [], "place": []}
        for query in queries:
            rows = [row for row in query if row >= 0]
            kinds["hit"].append([known[r] for r in rows if r in landed])
            kinds["miss"].append([self.slot[r] for r in rows if r not in landed and r in self.slot])
            kinds["place"].append([r for r in rows if r not in self.slot])
        return [list(pair) for pair in fetched], kinds

    def drop(self, rows):
        for row in rows:
            if row in self.slot:
                slot = self.slot.pop(row)
                del self.row[slot]
                self.dirty.discard(slot)


@pytest.mark.parametrize("seed", range(4))
def test_the_specification_agrees_with_dictionaries(seed):
    chance = random.Random(seed)
    row_count, oracle = 300, Oracle(128)
    arena = Arena.alone(row_count=row_count, slot_count=128)
    for step in range(1, 120):
        favourites = [chance.randrange(row_count) for _ in range(40)]
        for ticket in (2 * step, 2 * step + 1):
            width = chance.choice([3, 17, 90])
            queries = [
                [
                    chance.choice([-1, *favourites, chance.randrange(row_count)])
                    for _ in range(width)
                ]
                for _ in range(3)
            ]
            claims, split = plan(arena, *queries, step=step, ticket=ticket)
            fetched, kinds = oracle.plan(queries, step, ticket)
            assert list(map(list, zip(claims.rows, claims.slots, strict=True))) == fetched
            for kind, expected in kinds.items():
                positions = [[v for v in line if v >= 0] for line in getattr(split, kind).tolist()]
                assert positions == expected, (step, kind)
        if chance.random() < 0.7:
            specification.land(
                arena, np.flatnonzero(arena.ticket_of).astype(np.int32), ticket=2 * step
            )
            oracle.ticket = {s: 0 if t == 2 * step else t for s, t in oracle.ticket.items()}
        if chance.random() < 0.5:
            gone = chance.sample(range(row_count), 20)
            specification.drop(arena, ids(*gone))
            oracle.drop(gone)
        if chance.random() < 0.3 and oracle.victims(step):
            new, out = chance.choice([r for r in range(row_count) if r not in oracle.slot]), ids(0)
            assert specification.claim_new(arena, ids(new), step=step, out=out)
            slot = oracle.victims(step)[0]
            oracle.give(slot, new, step, 0)
            oracle.dirty.add(slot)
            assert out.tolist() == [slot]
        assert {r: int(s) for r, s in enumerate(arena.slot_of) if s >= 0} == oracle.slot
        assert {int(s) for s in np.flatnonzero(arena.dirty)} == oracle.dirty
