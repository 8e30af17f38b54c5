"""More requests than the device can hold to their ends: the youngest give way and come back."""

from __future__ import annotations

import pytest

from ess.engine.engine import Engine
from ess.engine.requests.request import Request
from ess.engine.tokens.sampling import Sampling
from ess.overlap.policy import Mode
from tests.model.test_engine import engine, expected, prompt, run

LENGTHS = (50, 60, 62)
TOKENS = 84


def crowd(*, promise: str, mtp: int = 1, depth: int = 0) -> tuple[Engine, list[Request]]:
    """Each request needs a page at first and three at its end; the device has five."""
    eng = engine("v32", mtp=mtp, modes="da", chunks=2, index_pages=5, promise=promise, depth=depth)
    return eng, [eng.add(prompt(length), Sampling(tokens_max=TOKENS)) for length in LENGTHS]


@pytest.mark.parametrize(
    ("mtp", "depth"),
    [
        (3, 1),
        pytest.param(1, 0, marks=pytest.mark.slow),
        pytest.param(1, 1, marks=pytest.mark.slow),
    ],
)
def test_the_youngest_give_way_and_everybody_ends(mtp, depth):
    eng, made = crowd(promise="some", mtp=mtp, depth=depth)
    oldest_states, chunk_count, together = set(), 0, 0
    for result in eng.run():
        eng.check()
        oldest_states.add(made[0].state)
        chunk_count += len(result.chunks)
        together = max(together, result.turn_count)
    run(eng)
    assert eng.preempted_count > 0
    assert "preempted" not in oldest_states, "the oldest gave way"
    assert together == 3
    assert chunk_count == 2 * len(LENGTHS), "a prompt was computed twice"
    for request in made:
        assert request.output == expected("v32", len(request.prompt), TOKENS)


def test_fully_promised_requests_wait_instead():
    eng, made = crowd(promise="all")
    for _ in range(10):
        eng.step()
    assert [each.state for each in made] == ["decoding", "waiting", "waiting"]
    assert eng.refusal is not None
    assert eng.refusal.limiter == "index pages"


def test_nobody_comes_back_at_once_unless_alone():
    eng, _ = crowd(promise="some")
    returned, gone_at = [], {}
    while not eng.is_idle:
        before = {each.number: each for each in eng._roster.of("preempted")}
        eng.step()
        now = {each.number for each in eng._roster.of("preempted")}
        for number in now - before.keys():
            gone_at[number] = eng.step_count
        for number in before.keys() - now:
            running = eng._roster.count("decoding")
            returned.append((eng.step_count - gone_at[number], running))
    assert returned
    assert all(away >= 16 or running == 1 for away, running in returned)


def test_what_could_not_run_alone_is_refused():
    eng = engine("v32", modes="none", index_pages=2, promise="some")
    request = eng.add(prompt(60), Sampling(tokens_max=TOKENS))
    fits = eng.add(prompt(60), Sampling(tokens_max=10))
    run(eng)
    assert request.reason == "refused"
    assert fits.reason == "length"


def test_a_prompt_gives_way_and_goes_on_where_it_was():
    eng = engine("v32", modes="none", chunks=2)
    request = eng.add(prompt(130), Sampling(tokens_max=5))
    eng.step()
    assert (request.state, request.prefilled_count) == ("prefilling", 48)
    eng.preempt(request)
    assert eng.is_idle
    assert eng.offload.stats().used_slot_count.sum() == 0
    eng.resume(request)
    assert (request.state, request.prefilled_count) == ("prefilling", 48)
    run(eng)
    assert request.output == expected("v32", 130, 5)


def test_room_held_by_others_is_waited_for():
    eng = engine("v32", modes="none", index_pages=4, promise="some")
    request = eng.add(prompt(60), Sampling(tokens_max=20))
    eng.step()
    with eng.offload.open(prompt(180)):
        assert len(list(eng.run())) < 20
        assert request.state == "preempted"
        assert eng.refusal is not None
    run(eng)
    assert request.output == expected("v32", 60, 20)


@pytest.mark.parametrize("depth", [0, 1])
def test_after_pressure_a_worker_runs_resident_again(depth):
    """256 slots per layer: 150 and 200 rows do not fit together, 150 to 200 alone do."""
    eng = engine("v32", mtp=2, modes="layerwise", chunks=4, depth=depth)
    long = eng.add(prompt(150), Sampling(tokens_max=55, ignore_eos=True))
    brief = eng.add(prompt(200), Sampling(tokens_max=8, ignore_eos=True))
    resident = []
    for _ in eng.run():
        eng.check()
        if brief.reason is None:
            continue
        resident.append(int(eng.tuning.mode_counts[:, Mode.RESIDENT].sum()))
    run(eng)
    assert eng.offload.stats().evicted_count.sum() > 0, "there was no pressure"
    assert resident[-1] - resident[0] > 10
    for request in (long, brief):
        budget = request.sampling.tokens_max
        assert request.output == expected("v32", len(request.prompt), budget)
