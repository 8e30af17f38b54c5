"""One step's turns and chunks: by rank, within the step, never beyond what a request may make."""

from __future__ import annotations

import random

import pytest

from ess.engine import scheduler
from ess.engine.plan import StepPlan
from ess.engine.requests.request import Request
from ess.engine.requests.roster import Roster
from ess.engine.tokens.sampling import Sampling


def crowd(*states: tuple[str, dict[str, int]]) -> Roster:
    """Requests of ten tokens and eight drafts, numbered from 0, but for what each one says."""
    roster = Roster()
    for number, (state, given) in enumerate(states):
        told = {"draft_count": 8, "tokens_max": 10, "length": 100, **given}
        sampling = Sampling(tokens_max=told.pop("tokens_max"))
        prompt = [1] * told.pop("length")
        roster.add(Request(number=number, prompt=prompt, sampling=sampling, state=state, **told))
    return roster


def test_ranks_follow_requests_that_come_move_and_leave():
    rng, roster, here = random.Random(5), Roster(), []
    for number in range(200):
        request = Request(number=number, prompt=[1, 2], sampling=Sampling())
        request.priority, request.state = rng.randrange(3), "prefilling"
        roster.add(request)
        here.append(request)
        for moved in rng.sample(here, min(len(here), 2)):
            to = "decoding" if moved.state == "prefilling" else "finished"
            roster.move(moved, to)
            here = [request for request in here if request.state != "finished"]
        by_rank = roster.by_rank("decoding", "prefilling")
        assert list(by_rank) == sorted(here, key=lambda request: request.rank)
        assert roster.by_rank("decoding", "prefilling") is by_rank, "sorted once more"
        roster.check()


def planned(roster: Roster, **bounds: int) -> StepPlan:
    wide = {"batch_max": 9, "query_max": 90, "verified_max": 9, "chunk_tokens": 48}
    return scheduler.plan(roster, **{**wide, **bounds})


def turns(roster: Roster, **bounds: int) -> list[tuple[int, int]]:
    return [(turn.request.number, turn.query_count) for turn in planned(roster, **bounds).turns]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({}, [(2, 9), (0, 9), (1, 9)]),
        ({"verified_max": 1}, [(2, 1), (0, 1), (1, 1)]),
        ({"verified_max": 3}, [(2, 3), (0, 3), (1, 3)]),
        ({"batch_max": 2}, [(2, 9), (0, 9)]),
        ({"query_max": 2}, [(2, 1), (0, 1)]),
        ({"query_max": 3}, [(2, 1), (0, 1), (1, 1)]),
        ({"query_max": 13}, [(2, 9), (0, 3), (1, 1)]),
        ({"query_max": 13, "batch_max": 2}, [(2, 9), (0, 4)]),
    ],
)
def test_the_first_in_rank_run_and_drafts_share_what_is_left_of_the_step(bounds, expected):
    decoding = [("decoding", {"priority": priority}) for priority in (0, 0, -1)]
    assert turns(crowd(*decoding), **bounds) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"draft_count": 0}, [(0, 1)]),
        ({"draft_count": 2}, [(0, 3)]),
        ({"tokens_max": 1}, [(0, 1)]),
        ({"tokens_max": 3}, [(0, 3)]),
        ({"ahead_count": 7}, [(0, 3)]),
        ({"ahead_count": 9}, [(0, 1)]),
        ({"ahead_count": 10}, []),
        ({"ahead_count": 12}, []),
    ],
)
def test_no_more_is_planned_than_a_request_has_drafts_for_or_may_still_make(given, expected):
    assert turns(crowd(("decoding", given))) == expected


def test_one_that_may_be_over_takes_no_place():
    roster = crowd(("decoding", {"ahead_count": 10}), ("decoding", {}))
    assert turns(roster, batch_max=1) == [(1, 9)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (0, 48)),
        ({"prefilled_count": 48}, (48, 96)),
        ({"prefilled_count": 51}, (51, 99)),
        ({"prefilled_count": 52}, (52, 99)),
    ],
)
def test_the_chunk_goes_on_up_to_the_last_prompt_token(given, expected):
    [chunk] = planned(crowd(("waiting", {}), ("prefilling", given), ("prefilling", {}))).chunks
    assert (chunk.request.number, (chunk.start, chunk.stop)) == (1, expected)
    assert chunk.is_last == (expected[1] == 99)
    assert planned(crowd(("waiting", {}), ("decoding", {}))).chunks == ()


@pytest.mark.parametrize(
    ("chunk_tokens", "lengths", "expected"),
    [
        (300, (64, 64, 64), [(0, 0, 63), (1, 0, 63), (2, 0, 63)]),
        (126, (64, 64, 64), [(0, 0, 63), (1, 0, 63)]),
        (180, (64, 64, 64), [(0, 0, 63), (1, 0, 63)]),
        (512, (64, 1000, 64), [(0, 0, 63), (1, 0, 448)]),
        (512, (400, 200, 10), [(0, 0, 399), (1, 0, 64)]),
        (512, (500, 100, 10), [(0, 0, 499)]),
        (100, (1000, 10), [(0, 0, 100)]),
        (100, (101, 10), [(0, 0, 100)]),
        (101, (101, 2), [(0, 0, 100), (1, 0, 1)]),
    ],
)
def test_prompts_share_the_tokens_of_a_step_and_the_last_is_cut_at_a_page(
    chunk_tokens, lengths, expected
):
    roster = crowd(*(("prefilling", {"length": length}) for length in lengths))
    chunks = planned(roster, chunk_tokens=chunk_tokens).chunks
    assert [(chunk.request.number, chunk.start, chunk.stop) for chunk in chunks] == expected


@pytest.mark.parametrize(
    ("most", "numbers"),
    [(64, [0]), (960, [0]), (1983, [0]), (1984, [0, 1]), (2111, [0, 1]), (2112, [0, 1, 2])],
)
def test_long_cached_prefixes_are_not_read_together_beyond_a_limit(most, numbers):
    """Whole pages count, up to a chunk's end: 960, 1,024 and 128 positions, for ten tokens each."""
    ends = [(951, 942), (1020, 1010), (127, 117)]
    prompts = [{"length": end, "prefilled_count": start} for end, start in ends]
    roster = crowd(*(("prefilling", given) for given in prompts))
    chunks = planned(roster, positions_max=most).chunks
    assert [chunk.request.number for chunk in chunks] == numbers


def test_the_rest_of_a_cut_prompt_goes_first_and_a_better_rank_before_it():
    cut = ("prefilling", {"length": 1000, "prefilled_count": 448})
    others = [("prefilling", {"length": 50}), ("prefilling", {"length": 50, "priority": -1})]
    chunks = planned(crowd(cut, *others), chunk_tokens=640).chunks
    assert [(chunk.request.number, chunk.start, chunk.stop) for chunk in chunks] == [
        (2, 0, 49),
        (0, 448, 999),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_every_prompt_is_prefilled_once_in_order_and_one_at_most_is_there_in_part(seed):
    rand = random.Random(seed)
    lengths = [rand.choice((2, 10, 64, 65, 66, 200, 700)) for _ in range(30)]
    roster = crowd(*(("prefilling", {"length": length}) for length in lengths))
    chunk_tokens, order = rand.choice((48, 64, 100, 512)), []
    while roster.count("prefilling"):
        chunks = planned(roster, chunk_tokens=chunk_tokens).chunks
        assert 0 < sum(chunk.count for chunk in chunks) <= chunk_tokens
        for chunk in chunks:
            assert chunk.start == chunk.request.prefilled_count
            chunk.request.prefilled_count = chunk.stop
            if chunk.is_last:
                order.append(chunk.request.number)
                roster.move(chunk.request, "decoding")
        started = [request.prefilled_count > 0 for request in roster.of("prefilling")]
        assert sum(started) <= 1
    assert order == sorted(order) == list(range(30))
