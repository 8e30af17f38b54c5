from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ess import cost
from ess.cost import Hiding
from ess.errors import BadInput
from ess.overlap import policy
from ess.overlap.policy import PATIENCE, WIN, Mode, Observation, PolicyState

RATE = cost.bytes_per_us(37.0)
BEHIND = Hiding(window_us=255.0, index_us=536.0, da_cost_us=27.0, dba_cost_us=36.0)


def begin(*misses: float, request_count: int = 80) -> PolicyState:
    return policy.start(
        misses=misses,
        request_count=request_count,
        row_bytes=656,
        bytes_per_us=RATE,
        hiding=BEHIND,
    )


def seen(*misses: float, request_count: int = 80) -> Observation:
    return Observation(misses=misses, request_count=request_count)


def test_each_layer_gets_its_own_mode():
    assert begin(10, 100, 400).vector == (Mode.NONE, Mode.DA, Mode.DBA)


def test_the_crossover_is_where_the_paper_has_it():
    modes = [begin(miss).vector[0] for miss in (200, 240)]
    assert modes == [Mode.DA, Mode.DBA]


def test_among_equals_the_simplest():
    assert policy.best_mode(cost.Exposed(none=5.0, da=5.0, dba=5.0)) is Mode.NONE
    assert policy.best_mode(cost.Exposed(none=9.0, da=5.0, dba=5.0)) is Mode.DA


def follow(state: PolicyState, observation: Observation, steps: int) -> PolicyState:
    for _ in range(steps):
        state = policy.advance(state, observation)
    return state


def test_a_vector_changes_after_winning_for_patience_steps_and_not_before():
    state = begin(10.0)
    heavy = seen(400.0)
    leads = []
    while state.vector == (Mode.NONE,):
        state = policy.advance(state, heavy)
        leads.append(state.lead_count)
    assert state.vector == (Mode.DBA,)
    assert leads[-1] == 0
    assert leads[-2] == PATIENCE - 1
    assert leads[:-1].count(PATIENCE - 1) == 1


def test_one_step_back_starts_the_count_again():
    state = dataclasses.replace(begin(100.0), vector=(Mode.NONE,), lead_count=PATIENCE - 1)
    level = dataclasses.replace(state, misses=(8.0,))
    assert policy.advance(level, seen(8.0)).lead_count == 0
    assert policy.advance(state, seen(100.0)).vector == (Mode.DA,)


def test_a_win_below_the_margin_changes_nothing():
    """DA costs 27; none costs just under 27 / (1 - WIN), then just over."""
    per_miss = cost.transfer_us(miss_count=1, request_count=80, row_bytes=656, bytes_per_us=RATE)
    edge = 27.0 / (1 - WIN) / per_miss
    for factor, mode in ((0.999, Mode.NONE), (1.001, Mode.DA)):
        miss = edge * factor
        state = dataclasses.replace(begin(miss), vector=(Mode.NONE,))
        assert follow(state, seen(miss), 3 * PATIENCE).vector == (mode,)


def test_resident_follows_the_ledger_at_once_and_leaves_no_trace():
    state = begin(10.0, 400.0)
    assert policy.modes(state, all_resident=True) == (Mode.RESIDENT,) * 2
    assert policy.modes(state, all_resident=False) == (Mode.NONE, Mode.DBA)


def test_rate_and_windows_follow_live_counters():
    state = begin(100.0)
    narrow = dataclasses.replace(BEHIND, window_us=0.0)
    slow = Observation(misses=(100.0,), request_count=80, bytes_per_us=RATE / 2, hiding=narrow)
    late = follow(state, slow, 400)
    assert late.bytes_per_us == pytest.approx(RATE / 2, rel=1e-6)
    assert late.hiding.window_us == pytest.approx(0.0, abs=1e-6)
    assert late.vector == (Mode.DBA,)
    assert follow(late, seen(100.0), 1).bytes_per_us == pytest.approx(late.bytes_per_us)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.lists(st.floats(0, 2000), min_size=3, max_size=3), min_size=80, max_size=120))
def test_same_counters_same_vectors_and_changes_are_far_apart(steps: list[list[float]]):
    runs = []
    for _ in range(2):
        state, vectors = begin(10.0, 100.0, 400.0), []
        for misses in steps:
            state = policy.advance(state, seen(*misses))
            vectors.append(state.vector)
        runs.append(vectors)
    assert runs[0] == runs[1]
    changes = [at for at in range(1, len(steps)) if runs[0][at] != runs[0][at - 1]]
    assert all(later - earlier >= PATIENCE for earlier, later in itertools.pairwise(changes))


@pytest.mark.parametrize(
    ("observation", "match"),
    [
        (seen(1.0, 2.0), "misses of 2 layers"),
        (seen(-1.0), "misses -1.0 rows"),
        (seen(float("nan")), "misses nan rows"),
        (seen(1.0, request_count=-1), "-1 requests"),
        (Observation(misses=(1.0,), request_count=1, bytes_per_us=0.0), "0.0 bytes"),
    ],
)
def test_bad_counters_are_refused(observation: Observation, match: str):
    with pytest.raises(BadInput, match=match):
        policy.advance(begin(10.0), observation)


def test_a_policy_without_layers_is_refused():
    with pytest.raises(BadInput, match="a miss rate and a mode for each layer"):
        begin()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"misses": [-1.0]}, "misses -1.0 rows"),
        ({"misses": [float("inf")]}, "misses inf rows"),
        ({"request_count": -1}, "-1 requests"),
        ({"bytes_per_us": 0.0}, "0.0 bytes"),
        ({"bytes_per_us": float("inf")}, "inf bytes"),
    ],
)
def test_a_policy_does_not_start_from_impossible_numbers(given: dict[str, Any], match: str):
    sound = {"misses": [1.0], "request_count": 1, "bytes_per_us": RATE}
    with pytest.raises(BadInput, match=match):
        policy.start(**{**sound, **given}, row_bytes=656, hiding=BEHIND)
