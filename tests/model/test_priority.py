"""The order of requests: a request of lower priority value enters first and is preempted last."""

from __future__ import annotations

import random

import pytest

from ess.engine.requests.admission import Admission
from ess.engine.requests.request import Request
from ess.engine.requests.roster import SPARE, Roster
from ess.engine.tokens.sampling import Sampling
from ess.engine.tpot_control import TPOT
from ess.errors import BadInput
from tests.model.test_engine import engine, expected, prompt, run

LENGTHS = (50, 60, 62)
TOKENS = 84


def crowd(*priorities: int, promise: str):
    """Each request needs a page at first and three at its end; the device has five."""
    eng = engine("v32", modes="da", chunks=2, index_pages=5, promise=promise)
    wanted = Sampling(tokens_max=TOKENS)
    pairs = zip(LENGTHS, priorities, strict=True)
    return eng, [eng.add(prompt(length), wanted, priority=each) for length, each in pairs]


@pytest.mark.parametrize(("priorities", "order"), [((0, 0, 0), [0, 1, 2]), ((0, 7, -7), [2, 0, 1])])
def test_the_waiting_enter_in_order_of_rank(priorities, order):
    eng, made = crowd(*priorities, promise="all")
    ended = []
    while not eng.is_idle:
        eng.step()
        ended += [i for i, each in enumerate(made) if each.reason and i not in ended]
    assert ended == order
    for request in made:
        assert request.output == expected("v32", len(request.prompt), TOKENS)


def test_the_first_in_rank_never_gives_way_and_the_last_does():
    eng, made = crowd(5, 0, -5, promise="some")
    states: list[set[str]] = [set(), set(), set()]
    while not eng.is_idle:
        eng.step()
        for seen, request in zip(states, made, strict=True):
            seen.add(request.state)
    assert ["preempted" in seen for seen in states] == [True, True, False]
    for request in made:
        assert request.output == expected("v32", len(request.prompt), TOKENS)


def test_one_that_is_first_now_is_asked_for_at_once():
    eng, made = crowd(0, 0, 0, promise="all")
    runs, waits, _ = made
    for _ in range(3):
        eng.step()
    assert (runs.state, waits.state) == ("decoding", "waiting")
    small = eng.add(prompt(20), Sampling(tokens_max=4), priority=-1)
    eng.step()
    assert small.state in ("prefilling", "decoding")
    assert waits.state == "waiting"
    while small.reason is None:
        eng.step()
    assert small.output == expected("v32", 20, 4)
    for each in made:
        eng.cancel(each)
    run(eng)


def test_one_that_is_preempted_by_hand_makes_room_for_one_that_waits():
    eng = engine("v32", modes="da", chunks=2, index_pages=6, promise="all")
    made = [eng.add(prompt(length), Sampling(tokens_max=TOKENS)) for length in LENGTHS]
    first, second, third = made
    for _ in range(4):
        eng.step()
    assert [each.state for each in made] == ["decoding", "decoding", "waiting"]
    eng.preempt(second)
    assert eng.preempted_count == 1
    eng.step()
    assert third.state in ("prefilling", "decoding")
    while first.reason is None or third.reason is None:
        eng.step()
    eng.resume(second)
    run(eng)
    for request in made:
        assert request.output == expected("v32", len(request.prompt), TOKENS)


def test_one_that_has_landed_waits_for_the_pace_and_nobody_waits_behind_it():
    roster = Roster()
    running, landed = (Request(number=n, prompt=[1], sampling=Sampling()) for n in range(2))
    for made, states in ((running, ("prefilling",)), (landed, ("landing", "preempted"))):
        roster.add(made)
        for state in states:
            roster.move(made, state)
    landed.has_landed = True

    def opens(request: Request) -> None:
        raise AssertionError(f"{request} is opened")

    def resumes(request: Request) -> None:
        roster.move(request, "prefilling")

    admission = Admission(roster, tpot_ms=50.0)
    admission.admit(opens, resumes, step_count=0, limit=1)
    assert landed.state == "preempted"
    assert admission.refusal.limiter == TPOT
    admission.admit(opens, resumes, step_count=0, limit=2)
    assert landed.state == "prefilling"


def test_a_priority_beyond_all_bounds_is_refused():
    eng = engine("v32", modes="none")
    with pytest.raises(BadInput, match="priority is 2147483648"):
        eng.add(prompt(4), priority=1 << 31)
    assert eng.is_idle


def test_the_roster_finds_the_first_whoever_left_in_between():
    rand, roster = random.Random(4), Roster()
    waiting: dict[int, Request] = {}
    left_count = 0
    for number in range(4000):
        priority = rand.choice((-1, 0, 0, 3))
        made = Request(number=number, prompt=[1], sampling=Sampling(), priority=priority)
        roster.add(made)
        waiting[number] = made
        while waiting and rand.random() < 0.5:
            gone = waiting.pop(rand.choice(list(waiting)))
            roster.move(gone, rand.choice(("prefilling", "finished")))
            left_count += 1
        first = roster.first_waiting()
        assert first is min(waiting.values(), key=lambda one: one.rank, default=None)
        assert len(roster._ranks) <= 2 * len(waiting) + SPARE
        if number % 100 == 0:
            roster.check()
    assert left_count > 500
