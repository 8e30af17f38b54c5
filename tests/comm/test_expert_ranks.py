"""Experts on several ranks give what they give on one, wherever they are and whichever ranks have
tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ess.comm.experts.expert_ranks import ExpertRanks, OutOfStep, Rooms
from ess.comm.experts.placement import Placement, even
from ess.comm.link import LinkLost
from ess.comm.local import local_group
from ess.errors import BadInput
from ess.kernels.experts import by_expert
from tests.comm.test_local import each

EXPERTS, PER_TOKEN = 12, 4
TWICE = Placement(((0, 5, 2, 3, 4), (4, 5, 6, 7, 0), (8, 9, 10, 11, 1)))
"""Experts 0, 4 and 5 on two ranks, and no rank in order."""
PLACEMENTS = [even(EXPERTS, 1), even(EXPERTS, 2), even(EXPERTS, 4), TWICE]


def chosen(count: int, seed: int) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    ranked = torch.rand(count, EXPERTS, generator=chance).argsort(1)[:, :PER_TOKEN]
    return ranked.sort(1).values


def tokens(count: int, seed: int, dtype: torch.dtype = torch.float32, width: int = 7) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=chance).to(dtype)


def made_by(expert: int, lines: Tensor) -> Tensor:
    """What an expert makes of tokens: exact in every dtype, and another for each expert."""
    return torch.cat((lines, torch.full((len(lines), 1), expert, dtype=lines.dtype)), 1)


def through(
    expert_ranks: ExpertRanks,
    given: Tensor,
    asked: Tensor,
    blocks: Sequence[range],
    column: int = 0,
) -> Tensor:
    """What the experts of this column have made: only they count."""
    weights = torch.zeros(asked.shape)
    weights[:, column] = 1.0
    return summed_by(expert_ranks, given, asked, weights, blocks)


def summed_by(
    expert_ranks: ExpertRanks,
    given: Tensor,
    asked: Tensor,
    weights: Tensor,
    blocks: Sequence[range],
    lengths: Tensor | None = None,
) -> Tensor:
    """Lines that are not to be read are NaN."""
    [whole] = expert_ranks.cuts(len(given), "batch")
    exchange = expert_ranks.depart(given, asked, weights, layer=3, cut=whole, lengths=lengths)
    exchange.send()
    received, own = exchange.arrive(), expert_ranks.own(3)
    order, ends = by_expert(received.places, len(own))
    outer = given.new_full((len(order), given.shape[1] + 1), torch.nan)
    for line, pair in enumerate(order[: int(ends[-1])].tolist()):
        token = received.tokens[received.lines[pair]][None]
        outer[line] = made_by(own[int(received.places[pair])], token)[0]
    for block in blocks:
        exchange.give_back(outer, order, F.pad(ends, (1, 0)), block)
    return exchange.collect(given.dtype, given.shape[1] + 1)


def in_blocks(placement: Placement, count: int) -> list[range]:
    total = placement.place_count
    size = -(-total // count)
    return [range(first, min(first + size, total)) for first in range(0, total, size)]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_count", [1, 2])
def test_every_line_comes_back_from_its_expert(
    placement: Placement, dtype: torch.dtype, block_count: int
) -> None:
    """Ranks with many tokens, with one and with none, four layers in turn."""
    blocks = in_blocks(placement, block_count)

    def act(group) -> list[tuple[Tensor, Tensor]]:
        expert_ranks, results = ExpertRanks(group.team, placement), []
        for turn in range(PER_TOKEN):
            count = (31, 1, 0, 5)[(group.rank + turn) % 4]
            seed = 10 * group.rank + turn
            given, asked = tokens(count, seed, dtype), chosen(count, seed)
            expected = [
                made_by(int(line[turn]), token[None])[0]
                for token, line in zip(given, asked, strict=True)
            ]
            results.append((through(expert_ranks, given, asked, blocks, turn), expected))
        return results

    size = placement.rank_count
    for result in each(local_group(size, team=size), act):
        assert isinstance(result, list), result
        for came, expected in result:
            pairs = zip(came, expected, strict=True)
            assert all(line.equal(wanted.float()) for line, wanted in pairs)


def test_what_travels_is_a_line_per_rank_and_a_line_per_expert() -> None:
    """To a rank a token's line goes once, whichever experts of it are there; back comes each."""
    placement, count, width = even(EXPERTS, 4), 9, 7

    def act(group) -> tuple[int, int]:
        expert_ranks = ExpertRanks(group.team, placement)
        asked = chosen(count, group.rank)
        through(expert_ranks, tokens(count, group.rank), asked, in_blocks(placement, 1))
        ranks = asked // placement.place_count
        goes = sum(len(set(line) - {group.rank}) for line in ranks.tolist())
        assert expert_ranks.traffic.exchange_count == 1
        assert expert_ranks.traffic.out_bytes == goes * (width * 4 + PER_TOKEN * 2)
        return expert_ranks.traffic.back_bytes, int((ranks != group.rank).sum())

    results = each(local_group(4, team=4), act)
    back, pairs = (sum(column) for column in zip(*results, strict=True))
    assert back == pairs * (width + 1) * 4


def test_copies_of_an_expert_share_its_tokens() -> None:
    asked = torch.zeros((6, 1), dtype=torch.long)
    assert TWICE.at(asked, first=0).flatten().tolist() == [0, 9] * 3
    assert TWICE.at(asked, first=1).flatten().tolist() == [9, 0] * 3
    assert TWICE.at(asked + 6, first=1).flatten().tolist() == [7] * 6


@pytest.mark.parametrize(
    ("places", "why"),
    [
        (((0, 1), (2,)), r"\[2, 1\] places, must be alike"),
        (((0, 1), (3, 4)), r"experts \[2\] have no place"),
        (((0, 0), (1, 2)), "rank 0 has an expert twice"),
        (((-1, 0), (1, 2)), "have no place"),
        (((), ()), "must be alike"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(places, why) -> None:
    with pytest.raises(BadInput, match=why):
        Placement(places)


def test_experts_that_do_not_divide_and_teams_of_another_size_are_refused() -> None:
    with pytest.raises(BadInput, match="12 experts cannot be shared equally by 5 ranks"):
        even(12, 5)
    with pytest.raises(BadInput, match="2 ranks in a team of 1"):
        ExpertRanks(local_group(1)[0].team, even(12, 2))


def alone(act: Callable[[ExpertRanks], object], *, rank: int) -> Callable[[object], object]:
    """Rank `rank` does `act`, the other goes through layer 3 of step 5."""

    def run(group) -> object:
        expert_ranks = ExpertRanks(group.team, even(EXPERTS, 2))
        expert_ranks.enter(5, Rooms())
        if group.rank == rank:
            return act(expert_ranks)
        return through(
            expert_ranks, tokens(2, 0), chosen(2, 0), in_blocks(expert_ranks.places.usual, 1)
        )

    return run


def begun(expert_ranks: ExpertRanks, *, layer: int) -> None:
    [whole], weights = expert_ranks.cuts(1, "batch"), torch.ones(1, PER_TOKEN)
    expert_ranks.depart(tokens(1, 0), chosen(1, 0), weights, layer=layer, cut=whole).send()


def test_a_rank_at_another_layer_or_step_is_named_by_all() -> None:
    def elsewhere(expert_ranks: ExpertRanks) -> None:
        begun(expert_ranks, layer=4)

    def earlier(expert_ranks: ExpertRanks) -> None:
        expert_ranks.enter(4, Rooms())
        begun(expert_ranks, layer=3)

    groups = local_group(2, team=2, patience_s=30)
    results = each(groups, alone(elsewhere, rank=1))
    assert all(isinstance(result, OutOfStep) for result in results), results
    assert "rank 1 is at exchange 0 of step 5, in layer 4" in str(results[0])
    assert "rank 0 is at exchange 0 of step 5, in layer 3" in str(results[1])
    results = each(local_group(2, team=2), alone(earlier, rank=1))
    assert "rank 1 is at exchange 0 of step 4, in layer 3" in str(results[0])


def test_a_rank_that_fails_ends_the_others_exchange() -> None:
    groups = local_group(2, team=2, patience_s=30)

    def fails(expert_ranks: ExpertRanks) -> None:
        groups[1].fail("rank 1 is out of order")

    waiting, _ = each(groups, alone(fails, rank=1))
    assert isinstance(waiting, LinkLost)
    assert "rank 1 is out of order" in str(waiting)


def test_a_rank_that_sends_nothing_ends_the_exchange_in_time() -> None:
    waiting, _ = each(
        local_group(2, team=2, patience_s=0.2), alone(lambda expert_ranks: None, rank=1)
    )
    assert isinstance(waiting, LinkLost)
    assert "members [1] sent nothing for 0.2 s" in str(waiting)


def test_sizes_are_checked_before_anything_is_sent() -> None:
    team = local_group(2, team=2)[0].team
    content = torch.zeros(4, dtype=torch.uint8)
    for given, due in (([4], [4]), ([2, 3], [2, 0]), ([2, 2], [1, 2]), ([2, -2], [2, 2])):
        with pytest.raises(BadInput):
            team.start(content, given, due)
    with pytest.raises(BadInput, match="content has the shape"):
        team.start(torch.zeros(4), [2, 2], [2, 2])


def test_many_exchanges_are_under_way_at_once_and_waited_for_in_any_order() -> None:
    def act(group) -> list[list[int]]:
        coming = [
            group.team.start(
                torch.full((3,), 10 * group.rank + n, dtype=torch.uint8), *([1, 1, 1],) * 2
            )
            for n in range(5)
        ]
        return [coming[n].wait().tolist() for n in (4, 0, 2, 1, 3)]

    for came in each(local_group(3, team=3), act):
        assert came == [[n, 10 + n, 20 + n] for n in (4, 0, 2, 1, 3)]
