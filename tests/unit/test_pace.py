"""The controller against machines whose times and chances are known."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import pytest

from ess.engine import tpot_control
from ess.engine.tpot_control import SPARE, Pace, SeenStep, drafts_of
from ess.errors import BadInput


@dataclass
class Machine:
    """Times in seconds; each draft is right with this chance."""

    fixed: float
    query: float
    draft: float
    chance: float
    noise: float = 0.05

    def seconds(self, depth: int, requests: int, verified_max: int) -> float:
        drafts = drafts_of(depth, verified_max)
        return self.fixed + self.query * depth * requests + self.draft * drafts

    def per_token(self, depth: int, requests: int, verified_max: int) -> float:
        made = sum(self.chance**place for place in range(depth))
        return self.seconds(depth, requests, verified_max) / made

    def run(self, state: Pace, requests: int, steps: int, seed: int = 0) -> Pace:
        draw = random.Random(seed)
        for _ in range(steps):
            depth = state.verified_count
            verified = []
            for _ in range(requests):
                right = [draw.random() < self.chance for _ in range(depth - 1)]
                verified.append((len(right), [*right, False].index(False)))
            exact = self.seconds(depth, requests, state.verified_max)
            seen = SeenStep(
                seconds=exact * (1 + draw.uniform(-self.noise, self.noise)),
                request_count=requests,
                query_count=depth * requests,
                draft_count=drafts_of(depth, state.verified_max),
                verified=verified,
            )
            state = tpot_control.advance(state, seen)
        return state


def fresh(target_ms: float | None = None, verified_max: int = 4, batch_max: int = 64) -> Pace:
    return tpot_control.start(
        target_ms=target_ms, verified_max=verified_max, batch_max=batch_max, chunk_max=512
    )


MACHINES = {
    "weights dominate, drafts are good": Machine(0.030, 0.0001, 0.001, 0.9),
    "queries dominate": Machine(0.002, 0.002, 0.001, 0.7),
    "drafts are bad": Machine(0.030, 0.0005, 0.003, 0.1),
    "in between": Machine(0.020, 0.0005, 0.002, 0.6),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("requests", [1, 8, 40])
def test_the_depth_is_near_the_best_for_the_load(name, requests):
    machine = MACHINES[name]
    state = machine.run(fresh(), requests, 600)
    best = min(machine.per_token(depth, requests, 4) for depth in range(1, 5))
    assert machine.per_token(state.depth, requests, 4) <= 1.08 * best


def test_depth_falls_when_the_load_rises_and_rises_again():
    machine = Machine(0.020, 0.001, 0.001, 0.6)
    light = machine.run(fresh(), 1, 400)
    heavy = machine.run(light, 60, 400)
    again = machine.run(heavy, 1, 400)
    assert min(light.depth, again.depth) >= 3
    assert heavy.depth <= 2


def test_better_drafts_are_found_after_bad_ones():
    bad, good = Machine(0.03, 0.001, 0.002, 0.05), Machine(0.03, 0.001, 0.002, 0.95)
    state = bad.run(fresh(), 4, 400)
    assert state.depth == 1
    assert good.run(state, 4, 1500).depth == 4


@pytest.mark.parametrize("name", MACHINES)
def test_the_batch_limit_keeps_the_target(name):
    """As many as the target allows on the real machine, found by admitting what it lets in."""
    machine = MACHINES[name]
    state = admitting(machine, 4)[-1]
    assert 0.75 * allowed(machine, 4) <= state.batch_limit <= 1.25 * allowed(machine, 4) + 1


def allowed(machine: Machine, verified_max: int) -> int:
    """At 60 ms per token."""
    depths = range(1, verified_max + 1)
    return max(
        n
        for n in range(1, 1001)
        if min(machine.per_token(depth, n, verified_max) for depth in depths) <= 0.060
    )


def admitting(machine: Machine, verified_max: int) -> list[Pace]:
    """A queue that never ends: 30 steps of as many as are let in, again and again."""
    states = [fresh(target_ms=60, verified_max=verified_max, batch_max=1000)]
    for seed in range(40):
        states.append(machine.run(states[-1], states[-1].batch_limit, 30, seed=seed))
    return states


@pytest.mark.parametrize("verified_max", [1, 2, 3])
def test_a_long_lone_step_does_not_keep_the_others_out(verified_max):
    """A guess of halves would say that two take 1.5 times 58 ms; in truth a second adds 2."""
    machine = Machine(0.056, 0.002, 0.0, 0.0)
    limits = [state.batch_limit for state in admitting(machine, verified_max)]
    assert limits[:2] == [1, 2]
    assert abs(limits[-1] - allowed(machine, verified_max)) <= 1
    assert allowed(machine, verified_max) == 2


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("verified_max", [1, 4])
def test_the_batch_grows_by_what_was_seen(name, verified_max):
    """Noise in narrow batches must not let in a crowd."""
    states = admitting(MACHINES[name], verified_max)
    for before, after in itertools.pairwise(states):
        assert after.batch_limit <= 2 * max(1, before.batch_limit, before.widest)
    most = allowed(MACHINES[name], verified_max)
    assert max(state.batch_limit for state in states) <= 1.5 * most + 1


def test_two_that_were_too_slow_are_not_tried_again():
    """Not even when so many lone steps have passed that the fit has forgotten the two."""
    machine = Machine(0.020, 0.036, 0.0, 0.0, noise=0.01)
    state = fresh(target_ms=60, verified_max=1)
    state = machine.run(state, 1, 50)
    assert state.batch_limit == 2
    state = machine.run(state, 2, 30)
    assert state.batch_limit == 1
    for _ in range(20):
        state = machine.run(state, 1, 100)
        assert state.batch_limit == 1
    faster = Machine(0.020, 0.010, 0.0, 0.0, noise=0.01)
    assert faster.run(state, 1, 500).batch_limit == 2, "but the load may change"


@pytest.mark.parametrize(("chance", "limit"), [(0.5, 35), (0.9, 44), (0.0, 35)])
def test_the_batch_limit_by_hand(chance, limit):
    """At depth 1 there is room for (60.5 - 20 - 5) / 1 requests; good drafts make room for more."""
    state = replace(
        fresh(target_ms=60.5 / (1 - SPARE), verified_max=3, batch_max=1000),
        times=(0.020, 0.001, 0.005),
        chances=(chance, chance),
        widest=1000,
        knows_sizes=True,
    )
    assert state.batch_limit == limit
    assert replace(state, widest=3).batch_limit == 6
    assert replace(state, batch_max=7).batch_limit == 7


def test_a_target_that_nothing_meets_still_admits_one():
    state = Machine(1.0, 0.1, 0.1, 0.5).run(fresh(target_ms=1), 1, 50)
    assert state.batch_limit == 1
    assert state.chunk_limit == 512, "nothing is known of chunks yet"
    state = tpot_control.advance(state, SeenStep(chunk_tokens=100, chunk_seconds=1.0))
    assert state.chunk_limit == 64


def test_chunks_fill_what_the_batch_leaves_in_whole_pages():
    state = Machine(0.020, 0.001, 0.0, 0.5, noise=0).run(
        fresh(target_ms=50, verified_max=1), 10, 50
    )
    state = tpot_control.advance(state, SeenStep(chunk_tokens=64, chunk_seconds=0.0064))
    assert state.chunk_limit == 192, "20 ms are left, a token takes 0.1"


def test_without_a_target_there_is_no_limit():
    state = Machine(1.0, 1.0, 1.0, 0.5).run(fresh(), 5, 20)
    assert (state.batch_limit, state.chunk_limit) == (64, 512)


def test_what_is_3_percent_better_is_not_enough_to_change():
    machine = Machine(0.02, 0.001, 0.0, 0.5, noise=0)
    state = machine.run(fresh(verified_max=2), 8, 300)
    depths = []
    for _ in range(100):
        state = machine.run(state, 8, 1, seed=len(depths))
        depths.append(state.depth)
    assert len(set(depths)) == 1


def test_a_target_must_be_a_time():
    for wrong in (0, -1, float("nan"), float("inf")):
        with pytest.raises(BadInput, match="tpot_ms"):
            fresh(target_ms=wrong)
