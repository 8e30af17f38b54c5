"""Exchanges of fixed sizes give what those give that tell their sizes, whichever ranks have the
tokens."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from ess.comm.experts.expert_ranks import ExpertRanks, Rooms
from ess.comm.experts.fixed import FixedExpertRanks
from ess.comm.experts.placement import Placement, even
from ess.comm.experts.sizes import CUT_TOKENS, line_count
from ess.comm.local import local_group
from tests.comm.test_expert_ranks import EXPERTS, PER_TOKEN, TWICE, chosen, summed_by, tokens
from tests.comm.test_local import each

COUNTS = (31, 1, 0, 5)
PLACEMENTS = [even(EXPERTS, 1), even(EXPERTS, 2), even(EXPERTS, 4), TWICE]


def fixed(group, placement: Placement) -> FixedExpertRanks:
    """On the host, whose memory needs no fetching."""
    made = FixedExpertRanks(group.team, placement, torch.device("cpu"), lambda there: there.clone)
    made.own(3)
    return made


def weights_for(count: int, seed: int) -> Tensor:
    return torch.rand(count, PER_TOKEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("room", [31, 40])
def test_sums_are_those_of_the_company_that_tells_its_counts(placement, dtype, within, room):
    """Of a room as large as the largest batch, and of a larger one. In bfloat16 each rank rounds
    its sum, of values that may cancel."""
    whole = [range(placement.place_count)]

    def act(group) -> list[tuple[Tensor, Tensor]]:
        told, results = ExpertRanks(group.team, placement), []
        expert_ranks = fixed(group, placement)
        for turn in range(3):
            expert_ranks.enter(turn, Rooms(batch=room))
            count, seed = COUNTS[(group.rank + turn) % 4], 10 * group.rank + turn
            given = tokens(count, seed, dtype, 8), chosen(count, seed), weights_for(count, seed)
            wanted, came = (summed_by(each, *given, whole) for each in (told, expert_ranks))
            results.append((came, wanted))
        return results

    size = placement.rank_count
    for result in each(local_group(size, team=size), act):
        assert isinstance(result, list), result
        for came, wanted in result:
            assert came.dtype == torch.float32
            torch.testing.assert_close(came, wanted, atol=8 * within, rtol=within)


@pytest.mark.parametrize("count", [0, 9])
def test_what_is_sent_follows_from_the_room_alone(count):
    """To each other rank all lines, with choices and weights behind them; a sum of each back."""
    room, width = 9, 8

    def act(group) -> tuple[int, ...]:
        expert_ranks = fixed(group, even(EXPERTS, 4))
        expert_ranks.enter(0, Rooms(batch=room))
        given = tokens(count, group.rank, width=width), chosen(count, 1), weights_for(count, 1)
        summed_by(expert_ranks, *given, [range(EXPERTS // 4)])
        sent = expert_ranks.traffic
        assert (sent.exchange_count, sent.token_count, sent.count_bytes) == (1, count, 0)
        return sent.out_bytes, sent.back_bytes

    lines = line_count(room, per_token=PER_TOKEN, line_bytes=4 * width)
    expected = 3 * lines * width * 4, 3 * room * (width + 1) * 4
    assert each(local_group(4, team=4), act) == [expected] * 4


def test_what_is_padding_of_the_step_may_lie_beyond_the_room():
    """A step in a large bucket, beside ranks that agreed on a small one."""

    def act(group) -> tuple[Tensor, Tensor]:
        expert_ranks, given = fixed(group, even(EXPERTS, 2)), tokens(9, group.rank)
        expert_ranks.enter(0, Rooms(batch=4))
        asked, weights = chosen(9, group.rank), weights_for(9, 1)
        came = summed_by(expert_ranks, given, asked, weights, [range(EXPERTS // 2)])
        told = ExpertRanks(group.team, even(EXPERTS, 2))
        return came, summed_by(told, given[:4], asked[:4], weights[:4], [range(EXPERTS // 2)])

    for came, wanted in each(local_group(2, team=2), act):
        torch.testing.assert_close(came[:4], wanted)
        assert not came[4:].any()


def test_all_ranks_cut_prompts_alike_and_halves_have_their_own_room():
    [group] = local_group(1)
    expert_ranks = fixed(group, even(EXPERTS, 1))
    expert_ranks.enter(0, Rooms(batch=8, half=5, chunk=2 * CUT_TOKENS + 3))
    assert expert_ranks.cuts(3, "batch") == expert_ranks.cuts(8, "batch") == [range(8)]
    assert expert_ranks.cuts(3, "half") == [range(5)]
    ends = (0, CUT_TOKENS, 2 * CUT_TOKENS, 2 * CUT_TOKENS + 3)
    cuts = [range(*pair) for pair in itertools.pairwise(ends)]
    assert expert_ranks.cuts(0, "chunk") == expert_ranks.cuts(2 * CUT_TOKENS, "chunk") == cuts


def test_choices_are_told_a_window_late_and_at_the_end_all_of_them():
    def act(group) -> list[int]:
        expert_ranks = fixed(group, even(EXPERTS, 2))
        seen = []
        for window in range(3):
            asked = torch.full((2 + group.rank, 1), window)
            expert_ranks.loads.count(3, asked)
            expert_ranks.loads.share(expert_ranks.team, 4, is_last=window == 2)
            seen.append(sum(expert_ranks.loads.recent().get(3, [])))
        assert expert_ranks.loads.recent()[3][:4] == [5, 5, 5, 0]
        return [*seen, expert_ranks.loads.step_count]

    assert each(local_group(2, team=2), act) == [[0, 5, 15, 12]] * 2


def test_pads_choose_nothing_and_are_not_counted():
    """Every second token is one; the others' sums are what they are without pads."""

    def act(group) -> tuple[Tensor, Tensor, int]:
        expert_ranks, whole = fixed(group, even(EXPERTS, 2)), [range(EXPERTS // 2)]
        expert_ranks.enter(0, Rooms(batch=6))
        given = tokens(6, group.rank, width=8), chosen(6, group.rank), weights_for(6, 1)
        lengths = torch.tensor([3, 0] * 3)
        came = summed_by(expert_ranks, *given, whole, lengths=lengths)
        wanted = summed_by(expert_ranks, *given, whole)
        expert_ranks.loads.share(expert_ranks.team, 1, is_last=True)
        return came, wanted, sum(expert_ranks.loads.recent()[3])

    for came, wanted, counted in each(local_group(2, team=2), act):
        assert torch.equal(came[::2], wanted[::2])
        assert not came[1::2].any()
        assert counted == 2 * (3 + 6) * PER_TOKEN
