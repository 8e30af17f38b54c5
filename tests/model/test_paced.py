"""The engine under a time per token: depth and batch follow the load, the tokens do not."""

from __future__ import annotations

import pytest

from ess.clock import Clock
from ess.engine.step import way
from ess.engine.step.laps import HostLap
from ess.engine.tokens.sampling import Sampling
from tests.model.test_engine import engine, expected, prompt, run


class LoadClock(Clock):
    """Time passes by what the engine does: per step and per query that the offload has begun."""

    def __init__(self, *, step_s: float, query_s: float) -> None:
        self._step_s, self._query_s = step_s, query_s
        self._passed_s = 0.0

    def now_s(self) -> float:
        return self._passed_s

    def watch(self, eng) -> None:
        begin = eng.offload.begin

        def timed(sequences, **given):
            step = begin(sequences, **given)
            self._passed_s += self._step_s + self._query_s * step.query_count
            return step

        eng.offload.begin = timed
        eng._clock, eng._flights._laps = self, lambda: HostLap(self)

    def prefilling(self, run_chunks, *, token_s: float):
        """`run_chunks` with the time that the tokens of all its spans take."""

        def timed(runner, spans, on_layer=None):
            self._passed_s += token_s * sum(len(span.tokens) for span in spans)
            return run_chunks(runner, spans, on_layer)

        return timed


@pytest.mark.parametrize("depth", [0, 1])
def test_depth_follows_the_load_and_the_tokens_stay(depth):
    """The random model's drafts are mostly wrong: where a query costs as much as a step, one token
    at a time is best."""
    eng = engine("v32", mtp=4, modes="none", mtp_auto=True, depth=depth)
    LoadClock(step_s=0.01, query_s=0.01).watch(eng)
    made = [eng.add(prompt(length), Sampling(tokens_max=60)) for length in (60, 90)]
    run(eng)
    assert eng.pace.depth == 1
    assert eng.pace.times[1] == pytest.approx(0.01, rel=0.3)
    for request in made:
        assert request.output == expected("v32", len(request.prompt), 60)


def test_no_more_enter_than_the_target_allows():
    eng = engine("v32", modes="none", chunks=6, tpot_ms=45.0)
    LoadClock(step_s=0.02, query_s=0.01).watch(eng)
    for _ in range(6):
        eng.add(prompt(1), Sampling(tokens_max=40))
    first = eng.step()
    assert first.turn_count == 1, "nothing is known: the first one alone"
    counts = []
    for result in eng.run():
        counts.append(result.turn_count)
        if eng.refusal is not None:
            assert eng.refusal.limiter == "time per token"
    assert max(counts) == 2, "20 ms and two times 10 are within 45, three times are not"
    assert eng.refusal is None


def test_a_second_one_enters_beside_a_slow_lone_one():
    """Alone a step takes 32 ms of 45: that two take 34 is only seen by letting them."""
    eng = engine("v32", modes="none", chunks=6, tpot_ms=45.0)
    LoadClock(step_s=0.03, query_s=0.002).watch(eng)
    made = [eng.add(prompt(1), Sampling(tokens_max=60)) for _ in range(6)]
    counts = [result.turn_count for result in eng.run()]
    assert counts[0] == 1
    assert max(counts) >= 4
    for request in made:
        assert request.output == expected("v32", 1, 60)


def test_packed_prompts_share_what_the_target_leaves(monkeypatch):
    """A token of a prompt takes 0.1 ms, and a step with one request leaves 29 ms of its 50: four
    pages, for all prompts together."""
    eng = engine("v32", modes="none", chunks=12, tpot_ms=50.0, chunk_tokens=512)
    clock = LoadClock(step_s=0.02, query_s=0.001)
    clock.watch(eng)
    monkeypatch.setattr(way, "run_chunks", clock.prefilling(way.run_chunks, token_s=1e-4))
    first = eng.add(prompt(20), Sampling(tokens_max=60))
    while len(first.output) < 40:
        eng.step()
    made = [eng.add(prompt(60), Sampling(tokens_max=9)) for _ in range(9)]
    packs = []
    while not all(request.output for request in made):
        limit = eng.pace.chunk_limit
        chunks = eng.step().chunks
        assert sum(chunk.count for chunk in chunks) <= limit <= 256
        packs.append(len(chunks))
    assert eng.pace.chunk_token_s == pytest.approx(1e-4)
    assert max(packs) > 1
    for request in made:
        assert request.output[:9] == expected("v32", 60, 9)[: len(request.output)]
