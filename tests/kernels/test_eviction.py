"""The rules of each eviction policy by hand; what holds under all of them."""

from __future__ import annotations

import numpy as np
import pytest

from ess.errors import BadInput
from ess.pool.lru import specification
from ess.pool.lru.arena import Arena, Lookup, Split
from ess.pool.lru.eviction import POLICIES, Evictions, follow, scored


def ids(*values):
    return np.array(values, np.int32)


class Pool:
    """64 slots under a policy, filled by rows 100 to 163 in steps 1 to 8."""

    def __init__(self, evict):
        self.arena = Arena.alone(row_count=320, slot_count=64, evict=evict)
        self.step = 0
        for first in range(100, 164, 8):
            assert self.select(*range(first, first + 8)) == list(range(first, first + 8))

    def select(self, *rows, ticket=1, lands=True):
        """Returns the rows that were fetched; `gone` has those that gave way, in slot order."""
        self.step += 1
        before = self.arena.row_of.copy()
        split = Split.create(query_count=1, top_k=len(rows))
        rows = ids(*rows)[None]
        made = specification.plan(self.arena, rows, step=self.step, ticket=ticket, split=split)
        specification.check(self.arena, step=self.step)
        self.gone = before[made.slots].tolist()
        if lands:
            specification.land(self.arena, made.slots, ticket=ticket)
        return made.rows.tolist()

    def state(self):
        arena, kept = self.arena, self.arena.eviction
        arrays = (arena.slot_of, arena.row_of, arena.last_use, kept.hand, kept.spared, kept.came)
        return [array.tolist() for array in arrays]


@pytest.mark.parametrize("evict", POLICIES)
def test_the_dirty_the_fetched_and_the_selected_stay(evict):
    pool = Pool(evict)
    pool.arena.dirty[[0, 9]], pool.arena.ticket_of[[1, 17]] = 1, 7
    kept = {100, 109, 101, 117, *range(150, 164)}
    pool.select(*range(150, 164), *range(70))
    assert not kept & set(pool.gone)
    assert len(pool.gone) == 64 - len(kept), "all others give way, and rows without a slot"
    assert (pool.arena.slot_of[list(kept)] >= 0).all()


@pytest.mark.parametrize("evict", POLICIES)
def test_free_slots_go_first_and_the_lowest_of_them(evict):
    pool = Pool(evict)
    specification.drop(pool.arena, ids(140, 120))
    pool.select(1, 2)
    assert pool.arena.slot_of[[1, 2]].tolist() == [20, 40]


@pytest.mark.parametrize("evict", POLICIES)
def test_new_rows_that_find_no_room_change_nothing(evict):
    pool = Pool(evict)
    pool.arena.dirty[3:] = 1
    before = pool.state()
    rows = ids(1, 2, 3, 4)
    assert not specification.claim_new(pool.arena, rows, step=9, out=np.zeros_like(rows))
    assert pool.state() == before


def test_the_hand_spares_what_was_selected_since_it_came_and_only_once():
    pool = Pool("sieve")
    pool.select(100, 102)
    pool.select(1, 2)
    assert pool.gone == [101, 103], "100 and 102 were selected again and are spared"
    pool.select(*range(10, 73))
    assert pool.gone[:62] == [*range(104, 164), 1, 2], "on from where it stood, to the newest"
    assert pool.gone[62:] == [100], "then from the oldest, which it has spared before"


def test_the_hand_goes_round_again_when_all_were_selected():
    pool = Pool("sieve")
    pool.select(*range(100, 164))
    pool.select(1)
    assert pool.gone == [100]
    pool.select(2)
    assert pool.gone == [101], "all visits were taken back in the first round"


def test_newcomers_wait_until_the_hand_has_begun_again():
    pool = Pool("sieve")
    pool.select(*range(100, 163))
    pool.select(1)
    assert pool.gone == [163], "the newest was the only one not selected again"
    pool.select(2)
    assert pool.gone == [100]


def test_warmed_rows_are_met_the_longest_unused_first():
    arena = Arena.alone(row_count=320, slot_count=64, evict="sieve")
    ages = np.arange(1, 65, dtype=np.int32)
    claims = specification.warm(arena, ids(*range(100, 164)), ages, step=300, ticket=1)
    specification.land(arena, claims.slots, ticket=1)
    split = Split.create(query_count=1, top_k=2)
    specification.plan(arena, ids(1, 2)[None], step=301, ticket=2, split=split)
    assert arena.slot_of[[163, 162, 161]].tolist() == [-1, -1, 61]


def observe(arena, logits, *chosen):
    room = np.zeros((1, 1), np.int32)
    lookup = Lookup(
        lines=ids(0, 1, 2, 3, 4)[None],
        host_page_of=room[0],
        stored=np.zeros((1, 1), np.uint64),
        rows=room,
        host_rows=room[0],
    )
    given = ids(*chosen)[None], ids(0), ids(len(logits))
    logits = np.array(logits, np.float32)[None]
    specification.observe(arena, lookup, *given, logits=logits)


def test_the_lowest_rank_gives_way_and_never_a_selected_row():
    pool = Pool("score")
    logits = np.linspace(1, 2, 320)
    logits[[1, 2, 3]], logits[[110, 150, 130]] = 1.9, (1.2, 1.1, 1.05)
    observe(pool.arena, logits, 160, 319)
    pool.select(1, 2, 130)
    assert pool.gone == [150, 110]
    pool.select(3)
    assert pool.gone == [130]


def test_equal_ranks_go_by_slot():
    pool = Pool("score")
    observe(pool.arena, np.ones(320), 0, 1)
    pool.select(1, 2)
    assert pool.gone == [100, 101]


def test_a_score_is_where_a_logit_lies_between_the_least_and_the_greatest_selected():
    logits = np.array([4, 2, 3, 1, 0, -9, np.nan, np.inf, 2.5], np.float32)
    assert scored(logits, ids(0, 1, 2, -1)).tolist() == [255, 128, 191, 64, 1, 0, 255, 255, 159]
    assert scored(logits[:3], ids(1)).tolist() == [128, 128, 128], "no length to measure by"


def test_a_rank_begins_at_the_first_score_and_goes_a_quarter_of_the_way():
    ranks = np.zeros(4, np.uint16)
    follow(ranks, ids(1, 3), np.array([200, 100]))
    assert ranks.tolist() == [0, 51200, 0, 25600]
    follow(ranks, ids(1, 3), np.array([100, 255]))
    assert ranks.tolist() == [0, 44800, 0, 35520]


def test_a_dropped_row_id_forgets_its_rank_even_without_a_slot():
    pool = Pool("score")
    observe(pool.arena, np.arange(320), 0, 319)
    assert pool.arena.eviction.rank_of[[300, 150]].all()
    specification.drop(pool.arena, ids(150, 300))
    assert pool.arena.eviction.rank_of[[300, 150]].tolist() == [0, 0]


def test_scores_are_for_the_policy_that_goes_by_them():
    with pytest.raises(AssertionError, match="under lru takes no scores"):
        observe(Arena.alone(row_count=320, slot_count=64), np.zeros(9), 1)


def test_an_unknown_policy_is_refused_by_name():
    with pytest.raises(BadInput, match="evict is 'mru', must be one of lru, sieve, score"):
        Evictions("mru", slot_count=64, row_count=64)
