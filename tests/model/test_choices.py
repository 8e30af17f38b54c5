"""Choices of one prompt: prefilled once, forked, and each says what it says alone."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from ess.engine.engine import Engine
from ess.engine.requests.request import Request
from ess.engine.tokens.sampling import Sampling
from tests.model.test_engine import engine, prompt, run

LENGTH = 150


def wish(seed: int, tokens_max: int = 9) -> Sampling:
    return Sampling(tokens_max=tokens_max, temperature=1.0, seed=seed, ignore_eos=True)


@functools.cache
def alone(family: str, seed: int) -> list[int]:
    eng = engine(family, modes="none", chunks=6)
    request = eng.add(prompt(LENGTH), wish(seed))
    run(eng)
    return request.output


def choices(eng: Engine, count: int = 3) -> list[Request]:
    first = eng.add(prompt(LENGTH), wish(0))
    return [first, *(eng.add(prompt(LENGTH), wish(s), leader=first) for s in range(1, count))]


def finished(eng: Engine) -> int:
    """Runs to the end, with audits; returns the prompt tokens that were computed."""
    computed = 0
    for result in eng.run():
        eng.offload.check()
        computed += sum(chunk.count for chunk in result.chunks)
    run(eng)
    return computed


@pytest.mark.parametrize(
    ("family", "mtp", "depth", "modes", "chunks"),
    [
        ("v32", 1, 0, "layerwise", 6),
        ("v32", 3, 1, "da", 2),
        ("glm", 2, 0, "none", 3),
        ("glm", 1, 1, "dba", 2),
    ],
)
def test_the_prompt_is_prefilled_once_and_the_tokens_stay(family, mtp, depth, modes, chunks):
    eng = engine(family, mtp=mtp, depth=depth, modes=modes, chunks=chunks)
    made = choices(eng)
    assert finished(eng) == LENGTH - 1
    for seed, request in enumerate(made):
        assert request.output == alone(family, seed), seed
    assert len({tuple(request.output) for request in made}) == 3


def test_full_pages_are_shared():
    eng = engine("v32", modes="none", chunks=6)
    made = choices(eng)
    while made[2].state != "decoding":
        eng.step()
    pages = [request.sequence.holding.host_pages.tolist() for request in made]
    assert pages[0][:2] == pages[1][:2] == pages[2][:2]
    assert len({pages[i][2] for i in range(3)}) == 3, "149 rows: the third page is partial"
    run(eng)


def test_a_leader_that_ends_early_is_followed_by_the_next():
    eng = engine("v32", modes="none", chunks=6)
    made = choices(eng)
    eng.step()
    assert [each.state for each in made] == ["prefilling", "waiting", "waiting"]
    eng.cancel(made[0])
    finished(eng)
    assert [each.reason for each in made] == ["cancelled", "length", "length"]
    for seed in (1, 2):
        assert made[seed].output == alone("v32", seed)


def test_who_follows_a_follower_follows_its_leader():
    eng = engine("v32", modes="none", chunks=6)
    second = choices(eng, count=2)[1]
    third = eng.add(prompt(LENGTH), wish(2), leader=second)
    assert finished(eng) == LENGTH - 1
    assert third.output == alone("v32", 2)


def test_who_comes_when_the_prompt_is_there_does_not_wait_for_the_leader():
    eng = engine("v32", modes="none", chunks=6)
    first = eng.add(prompt(LENGTH), wish(0, 40))
    while first.state != "decoding":
        eng.step()
    late = eng.add(prompt(LENGTH), wish(1, 40), leader=first)
    eng.step()
    assert (first.state, late.state) == ("decoding", "decoding")
    run(eng)
    assert late.output[:9] == alone("v32", 1)


def test_a_follower_may_be_cancelled_while_it_waits():
    eng = engine("v32", modes="none", chunks=6)
    made = choices(eng)
    eng.step()
    eng.cancel(made[1])
    assert (made[1].state, made[1].reason) == ("finished", "cancelled")
    assert finished(eng) == LENGTH - 1 - 48
    assert made[2].output == alone("v32", 2)


def test_where_all_do_not_fit_the_others_wait_and_find_the_prefix():
    """Each choice has three pages and shares two: four fit beside another's."""
    eng = engine("v32", modes="none", chunks=6, host_pages=5)
    made = choices(eng, count=5)
    states = set()
    for _ in eng.run():
        states.add(tuple(each.state for each in made))
    assert any(each.count("decoding") == 3 and each.count("waiting") == 2 for each in states)
    run(eng)
    for seed, request in enumerate(made):
        assert request.output == alone("v32", seed), seed
    assert {request.reason for request in made} == {"length"}


def test_nobody_is_overtaken_by_a_fork():
    eng = engine("v32", modes="none", chunks=6, host_pages=9)
    first = eng.add(prompt(LENGTH), wish(0, 40))
    large = eng.add(prompt(400), Sampling(tokens_max=4), priority=-1)
    eng.step()
    follower = eng.add(prompt(LENGTH), wish(1, 40), leader=first)
    order = []
    for _ in eng.run():
        order += [
            each for each in (large, follower) if each.state == "decoding" and each not in order
        ]
    run(eng)
    assert order == [large, follower]


def test_a_choice_that_asks_for_chances_of_its_prompt_gets_them():
    eng = engine("v32", modes="none", chunks=6)
    first, *_ = choices(eng)
    asked = dataclasses.replace(wish(3), prompt_logprobs=0, prompt_start=100)
    scored = eng.add(prompt(LENGTH), asked, leader=first)
    chances = []
    for result in eng.run():
        listed = zip(result.chunks, result.scored, strict=True)
        chances += [each for chunk, of in listed if chunk.request is scored for each in of]
    run(eng)
    assert len(chances) == LENGTH - 1 - 100
    assert scored.output == alone("v32", 3)


def test_what_differs_does_not_follow():
    eng = engine("v32", modes="none", chunks=6)
    first = eng.add(prompt(LENGTH), wish(0))
    other = eng.add(prompt(90), wish(1), leader=first)
    longer = eng.add(prompt(LENGTH), wish(2, tokens_max=12), leader=first)
    finished(eng)
    assert first.output == alone("v32", 0)
    assert longer.output[:9] == alone("v32", 2)
    assert len(other.output) == 9
