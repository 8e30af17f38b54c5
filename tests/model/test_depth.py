"""Depth 1 gives the tokens of depth 0, and the host plans without looking."""

from __future__ import annotations

import itertools
import random
from collections import deque
from contextlib import contextmanager, suppress

import pytest

from ess.door.sequences import holding
from ess.door.steps import beginning
from ess.engine import scheduler
from ess.engine.plan import Feed
from ess.engine.requests.request import Request
from ess.engine.step import way
from ess.engine.step.feeding import Outcome
from ess.engine.step.underway.future import FutureMap
from ess.engine.tokens.sampling import Sampling
from ess.engine.tokens.verification import Choice
from ess.errors import PoolFull
from tests.model.test_engine import engine, expected, prompt, run
from tests.support.few import few

LONG = (pytest.mark.slow, pytest.mark.long)


@pytest.mark.parametrize(
    ("family", "mode", "mtp"),
    few(
        [("v32", "none", 1), ("glm", "da", 4), ("glm", "dba", 2), ("v32", "resident", 4)],
        all_of=itertools.product(("v32", "glm"), ("none", "da", "dba", "resident"), (1, 2, 4)),
    ),
)
def test_a_step_late_the_tokens_are_the_same(family, mode, mtp):
    eng = engine(family, mtp=mtp, modes=mode, chunks=1, depth=1)
    made = [eng.add(prompt(length), Sampling(tokens_max=10)) for length in (1, 2, 90, 130)]
    run(eng)
    for request in made:
        assert request.output == expected(family, len(request.prompt), 10), len(request.prompt)
        assert request.reason == "length"


@contextmanager
def hidden(eng):
    """What the device knows and the host does not is away while this lasts."""
    tables, future = eng.offload._pools.tables, eng._flights._future
    seen = tables.lengths, future._tokens, future._outcomes
    tables.lengths = future._tokens = future._outcomes = None
    yield
    tables.lengths, future._tokens, future._outcomes = seen


@pytest.mark.parametrize("mtp", [1, 4])
def test_plan_and_pages_are_made_without_the_device_s_knowledge(mtp, monkeypatch):
    eng = engine("v32", mtp=mtp, modes="da", depth=1)
    blind_count = 0

    def blind(function):
        def call(*args, **kwargs):
            nonlocal blind_count
            blind_count += bool(eng._flights)
            with hidden(eng):
                return function(*args, **kwargs)

        return call

    monkeypatch.setattr(scheduler, "plan", blind(scheduler.plan))
    monkeypatch.setattr(beginning, "grow", blind(holding.grow))
    for length in (60, 90, 130):
        eng.add(prompt(length), Sampling(tokens_max=40))
    late_count = 0
    for result in eng.run():
        late_count += bool(result.turn_count and eng._flights)
    assert late_count > 10, "the host was hardly ever behind"
    assert blind_count > 10


def test_a_step_is_launched_before_the_one_before_is_learned():
    eng = engine("v32", modes="none", depth=1)
    request = eng.add(prompt(1), Sampling(tokens_max=3))
    known, under_way = [], []
    while not eng.is_idle:
        eng.step()
        known.append(len(request.output))
        under_way.append(len(eng._flights))
    assert known == [0, 1, 2, 3]
    assert under_way == [1, 1, 1, 0]


def scenario(eng, seed: int) -> list[Request]:
    """Joins, leaves, cancels, preempts and resumes at random moments; prefixes are shared."""
    choose = random.Random(seed)
    made: list[Request] = []
    for _ in range(40):
        action = choose.choice(["add", "add", "cancel", "preempt", "resume", "step", "step"])
        live = [each for each in made if each.state != "finished"]
        if action == "add" and len(live) < 4:
            length = choose.choice([1, 70, 130, 150])
            made.append(eng.add(prompt(length), Sampling(tokens_max=choose.randint(1, 12))))
        elif action == "cancel" and live and choose.random() < 0.3:
            eng.cancel(choose.choice(live))
        elif action == "preempt":
            running = [each for each in live if each.state in ("prefilling", "decoding")]
            if running:
                eng.preempt(choose.choice(running))
        elif action == "resume":
            held = [each for each in live if each.state == "preempted"]
            if held:
                with suppress(PoolFull):
                    eng.resume(choose.choice(held))
        eng.step()
        eng.check()
    for request in made:
        deque(eng.run())
        if request.state == "preempted":
            eng.resume(request)
    run(eng)
    return made


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(s, marks=LONG) for s in range(4, 18))])
def test_joins_leaves_cancels_and_preemptions_at_any_moment(seed):
    """Every request says the plain model's tokens, as far as it got; nothing is left behind."""
    mode, mtp = ["none", "da", "dba"][seed % 3], [4, 1, 2][seed % 3]
    eng = engine("v32", mtp=mtp, modes=mode, chunks=2, depth=seed % 4 != 3, host_pages=40)
    made = scenario(eng, seed)
    assert len(made) > 3
    for request in made:
        truth = expected("v32", len(request.prompt), 12)
        assert request.output == truth[: len(request.output)]
        assert request.reason in ("length", "cancelled")
        if request.reason == "length":
            assert len(request.output) == request.sampling.tokens_max


@pytest.mark.parametrize("depth", [1, pytest.param(0, marks=LONG)])
def test_a_request_that_is_cancelled_behind_any_step_leaves_nothing(depth):
    eng = engine("v32", mtp=2, modes="none", depth=depth, chunks=1)
    ledger, seen = eng.offload._pools.ledger, set()
    for count in range(30):
        other = eng.add(prompt(2), Sampling(tokens_max=10))
        request = eng.add(prompt(100), Sampling(tokens_max=4), salt=bytes([count]))
        for _ in range(count):
            eng.step()
        if count in (2, 5):
            eng.preempt(request)
        seen.add(request.state)
        if request.state == "finished":
            break
        said = list(request.output)
        eng.cancel(request)
        eng.cancel(request)
        deque(eng.run())
        eng.check()
        run(eng)
        assert [ledger.promised(name) for name in ledger.capacities()] == [0, 0, 0]
        assert request.reason == "cancelled"
        assert request.output == said, "it spoke after it was cancelled"
        assert other.output == expected("v32", 2, 10)
    assert seen == {"waiting", "prefilling", "decoding", "preempted", "finished"}


@pytest.mark.parametrize("mtp", [1, 3])
def test_a_surplus_step_is_dropped(mtp):
    tokens_made = expected("v32", 90, 10)
    stop = tokens_made[4]
    eng = engine("v32", mtp=mtp, modes="none", depth=1)
    request = eng.add(prompt(90), Sampling(tokens_max=10, stop_ids=frozenset({stop})))
    said: list[int] = []
    surplus_count = 0
    for result in eng.run():
        said += [token for made in result.made for token in made.tokens]
        surplus_count += request.reason is not None and request.flight_count
    run(eng)
    assert request.output == said == tokens_made[: tokens_made.index(stop) + 1]
    assert request.reason == "stop"
    assert surplus_count == 1
    assert request.sequence is None


REASONS = {
    "repetition": Sampling(tokens_max=8, repetition_penalty=1.5),
    "presence": Sampling(tokens_max=8, presence_penalty=2.0),
    "frequency": Sampling(tokens_max=8, frequency_penalty=2.0),
    "min_tokens": Sampling(tokens_max=8, tokens_min=4, stop_ids=frozenset(range(100))),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_needs_the_tokens_runs_at_depth_0(name):
    """The whole batch does, as long as the request is in it; the tokens stay those of depth 0."""
    outputs = []
    for depth in (0, 1):
        eng = engine("v32", mtp=2, modes="none", depth=depth)
        plain = eng.add(prompt(70), Sampling(tokens_max=24))
        bound = eng.add(prompt(90), REASONS[name])
        seen = []
        for _ in eng.run():
            seen.append((bool(eng.depth_reasons()), len(eng._flights)))
        assert any(reason for reason, _ in seen)
        outputs.append(bound.output)
        assert plain.output == expected("v32", 70, 24)
        if depth == 1:
            pairs = itertools.pairwise(seen)
            assert not any(flights for (reason, _), (_, flights) in pairs if reason)
            assert any(flights for _, flights in seen), "it never came back to depth 1"
    assert outputs[0] == outputs[1]


def test_depth_reasons_name_the_request_and_all_its_reasons():
    eng = engine("v32", modes="none", depth=1)
    eng.add(prompt(1), Sampling(temperature=1.0, seed=3, stop_ids=frozenset({7}), top_p=0.5))
    eng.step()
    assert eng.depth_reasons() == ()
    eng.add(prompt(1), Sampling(presence_penalty=1.0, tokens_min=2))
    eng.step()
    assert eng.depth_reasons() == (
        "request 1: penalties count the output",
        "request 1: min_tokens is not reached",
    )


def test_sampling_that_needs_only_its_position_overlaps():
    outputs = []
    for depth, mtp in ((0, 1), (1, 3)):
        eng = engine("v32", mtp=mtp, modes="none", depth=depth)
        sampling = Sampling(tokens_max=12, temperature=1.0, top_k=40, seed=9, logit_bias={3: 4.0})
        request = eng.add(prompt(60), sampling)
        run(eng)
        outputs.append(request.output)
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) > 3


def test_drafts_follow_the_tokens_that_were_accepted(monkeypatch):
    told: list[int] = []

    def draft(runner, batch, hidden, following, last, count):
        told.extend(following[: last[0] + 1].tolist())
        return made(runner, batch, hidden, following, last, count)

    made = way.draft
    monkeypatch.setattr(way, "draft", draft)
    eng = engine("v32", mtp=2, modes="none", depth=0)
    request = eng.add(prompt(60), Sampling(tokens_max=12))
    run(eng)
    assert len(told) >= 11
    assert told[:12] == request.output[: len(told)]


def test_an_outcome_counts_drafts_and_not_the_newest_token():
    request = Request(number=0, prompt=[1], sampling=Sampling())
    for tokens, targets, verified in (
        ((1,), (2,), (0, 0)),
        ((1, 2, 3), (2, 3, 4), (2, 2)),
        ((1, 2, 3), (5,), (2, 0)),
    ):
        assert Outcome(Feed(request, tokens, 0), Choice(targets), ()).verified == verified


def test_the_map_gives_each_thing_once_and_in_order():
    future = FutureMap(line_max=2, token_max=3)
    assert (future.lines(), future.step_numbers()) == (set(), [])
    future.stash(1, [5, 6])
    assert (future.lines(), future.step_numbers()) == ({1}, [])
    with pytest.raises(AssertionError, match="stashed twice"):
        future.stash(1, [5])
    with pytest.raises(AssertionError, match="not produced"):
        future.take(1, 3)
    future.check()
    assert future.take(1, 2) == (5, 6)
    with pytest.raises(AssertionError, match="taken before"):
        future.take(1, 1)
    with pytest.raises(AssertionError, match="are no tokens"):
        future.stash(0, [-1])
    outcome = Outcome(
        Feed(Request(number=0, prompt=[1], sampling=Sampling()), (1,), 0), Choice((2,)), ()
    )
    assert (future.lines(), future.step_numbers()) == (set(), [])
    future.tell(7, [outcome])
    assert (future.lines(), future.step_numbers()) == (set(), [7])
    with pytest.raises(AssertionError, match="in order"):
        future.tell(7, [])
    with pytest.raises(AssertionError, match="step 7 comes before step 8"):
        FutureMap.learn(future, 8)
    future.tell(9, [])
    assert future.learn(9) == ()
    with pytest.raises(AssertionError, match="is learned"):
        future.learn(9)
    assert (future.lines(), future.step_numbers()) == (set(), [])
