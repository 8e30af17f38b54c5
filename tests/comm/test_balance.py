"""Experts are placed so that ranks have about as much to do; loads are counted alike on all."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from ess.comm.experts.balance import balance, balanced, copy_counts, rank_loads
from ess.comm.experts.expert_ranks import ExpertRanks
from ess.comm.experts.loads import WINDOWS
from ess.comm.experts.placement import Placement, Places, even
from ess.comm.local import local_group
from ess.errors import BadInput
from tests.comm.test_expert_ranks import EXPERTS, TWICE, chosen, in_blocks, through, tokens
from tests.comm.test_local import each


def skewed(count: int, seed: int, steepness: float) -> list[float]:
    """As chosen by a router that has favourites: Zipf's law in any order."""
    loads = [1000 / (1 + at) ** steepness for at in range(count)]
    random.Random(seed).shuffle(loads)
    return loads


def cases(count: int) -> list[tuple[int, int, int, float, int]]:
    drawn, listed = random.Random(7), []
    while len(listed) < count:
        experts, ranks = drawn.choice([4, 12, 60, 64]), drawn.choice([1, 2, 3, 4, 8])
        redundant = -experts % ranks + ranks * drawn.randrange(4)
        if redundant <= experts * (ranks - 1):
            steepness = drawn.choice([0.0, 0.5, 1.0, 3.0])
            listed.append((experts, ranks, redundant, steepness, len(listed)))
    return listed


def test_every_placement_is_one_whatever_the_loads():
    """As many places on each rank, every expert at least one, none twice on a rank."""
    for experts, ranks, redundant, steepness, seed in cases(200):
        loads = skewed(experts, seed, steepness)
        places = balanced(loads, ranks, redundant)
        assert Placement(places).expert_count == experts
        assert sum(map(len, places)) == experts + redundant
        assert sum(rank_loads(places, loads)) == pytest.approx(sum(loads))
        assert places == balanced(loads, ranks, redundant)


@pytest.mark.parametrize(("experts", "ranks", "redundant"), [(64, 8, 8), (256, 32, 32)])
def test_copies_of_the_busiest_even_out_what_runs_of_experts_cannot(experts, ranks, redundant):
    """The mean of all ranks is near what the busiest has to do; in contiguous runs it is far."""
    for seed in range(5):
        loads = skewed(experts, seed, 0.8)
        plain = balance(even(experts, ranks).places, loads)
        packed = balance(balanced(loads, ranks), loads)
        assert plain < 0.65
        assert packed > plain
        assert balance(balanced(loads, ranks, redundant), loads) > 0.98


def test_with_few_experts_no_other_placement_is_better():
    """Against all ways to have 6 experts on 3 ranks, with copies as they are given out."""
    for seed in range(10):
        loads = skewed(6, seed, 1.0)
        most = max(rank_loads(balanced(loads, 3, 3), loads))
        copies = [e for e, count in enumerate(copy_counts(loads, 3, 3)) for _ in range(count)]
        best = min(
            max(rank_loads((first, second, third), loads))
            for first in set(itertools.combinations(copies, 3))
            for second in set(itertools.combinations(less(copies, first), 3))
            for third in [less(less(copies, first), second)]
            if all(len(set(own)) == 3 for own in (first, second, third))
        )
        assert most <= best * 4 / 3


def less(copies, own) -> tuple[int, ...]:
    left = list(copies)
    for expert in own:
        left.remove(expert)
    return tuple(left)


def test_the_busiest_expert_has_a_copy_on_every_rank_and_no_more():
    places = balanced([1000, 1, 1, 1], 4, redundant=4)
    assert all(0 in own for own in places)
    assert copy_counts([1000, 1, 1, 1], 4, 4) == [4, 2, 1, 1]
    assert balanced([5, 5, 5], 1) == ((0, 1, 2),)


def test_room_is_made_where_the_free_places_are_on_ranks_that_have_the_expert():
    """The second copy of expert 4 comes when rank 0 alone has a place, and the first copy: expert 0
    moves there from rank 1."""
    loads = [1, 1, 1, 2, 1, 4, 2, 2, 1, 4]
    places = balanced(loads, 3, redundant=14)
    assert [len(set(own)) for own in places] == [8, 8, 8]
    assert [4 in own for own in places] == [True, True, False]
    assert [0 in own for own in places] == [True, False, True]
    assert max(rank_loads(places, loads)) == pytest.approx(20 / 3)


@pytest.mark.parametrize(
    ("experts", "ranks", "redundant", "says"),
    [
        (12, 5, 0, "12 experts cannot be shared equally by 5 ranks: redundant_experts may be 3"),
        (12, 4, 3, "12 experts and 3 redundant ones cannot be shared equally by 4 ranks"),
        (4, 2, 6, "redundant_experts is 6, must be 0 to 4 for 4 experts on 2 ranks"),
        (4, 1, 1, "must be 0 to 0"),
    ],
)
def test_places_that_cannot_be_shared_are_refused(experts, ranks, redundant, says):
    with pytest.raises(BadInput, match=says):
        balanced([1] * experts, ranks, redundant)


def test_layers_have_placements_of_their_own_and_of_one_shape():
    places = Places(even(EXPERTS, 3), {4: Placement(((0, 1, 2, 9), (3, 4, 5, 6), (7, 8, 10, 11)))})
    assert places.of(4).places[0] == (0, 1, 2, 9)
    assert places.of(5) == even(EXPERTS, 3)
    with pytest.raises(BadInput, match=r"\(3, 4, 12\), \(3, 5, 12\)"):
        Places(even(EXPERTS, 3), {4: TWICE})


def test_each_layer_s_tokens_go_where_its_experts_are():
    """Layer 3 of `through` has a placement of its own."""
    places = Places(TWICE, {3: Placement(balanced(range(EXPERTS), 3, redundant=3))})

    def act(group) -> bool:
        expert_ranks, count = ExpertRanks(group.team, places), 5 + group.rank
        given, asked = tokens(count, group.rank), chosen(count, group.rank)
        blocks = in_blocks(places.usual, 2)
        for column, experts in enumerate(asked.T):
            came = through(expert_ranks, given, asked, blocks, column)
            assert came[:, -1].equal(experts.float()), column
        return expert_ranks.own(3) == places.of(3).places[group.rank]

    assert each(local_group(3, team=3), act) == [True] * 3


def test_all_ranks_hear_what_all_have_chosen_and_forget_what_is_old():
    def act(group) -> tuple[dict[int, list[int]], int]:
        expert_ranks = ExpertRanks(group.team, even(EXPERTS, 3))
        for window in range(WINDOWS + 2):
            for layer in (3, 5):
                expert_ranks.loads.count(
                    layer,
                    chosen(4, 10 * window + group.rank)
                    if layer == 3
                    else torch.empty((0, 4), dtype=torch.long),
                )
            expert_ranks.loads.share(group.team, 7)
        return expert_ranks.loads.recent(), expert_ranks.loads.step_count

    (recent, steps), *others = each(local_group(3, team=3), act)
    assert all(other == (recent, steps) for other in others)
    assert steps == 7 * WINDOWS
    kept = [chosen(4, 10 * window + rank) for window in range(2, WINDOWS + 2) for rank in range(3)]
    assert recent[3] == torch.cat(kept).flatten().bincount(minlength=EXPERTS).tolist()
    assert recent[5] == [0] * EXPERTS
