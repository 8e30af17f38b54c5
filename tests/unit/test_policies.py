"""The policy laboratory against independent simulations that share no code with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from ess.bench.locality import lru_bruteforce
from ess.errors import BadInput
from ess.sim.locality import laboratory
from ess.sim.locality.laboratory import Start
from ess.sim.locality.oracles import Min, next_uses
from ess.sim.locality.policies import Fifo, PlannerArena, Random, ScoreEma, SelectionEma, Sieve
from ess.sim.locality.selections import LayerProfile, RequestLoad
from ess.sim.locality.stack_distances import miss_curve
from ess.sim.locality.workloads import Step, Workload, generated

SMALL = RequestLoad(context=400, step_count=60, query_count=2, top_k=32, recent=2, seed=5)
QUIET = LayerProfile(hot=70, cold=3, drift=1.0)


def workload_of(steps: list[list[list[int]]], *, row_count: int) -> Workload:
    made = [Step(rows=np.array(rows, np.int32), fresh=np.empty(0, np.int32)) for rows in steps]
    return Workload(
        name="by hand",
        row_count=row_count,
        query_count_max=max(len(rows) for rows in steps),
        step_count=len(steps),
        windows=np.empty((0, 1), np.int32),
        steps=lambda: iter(made),
    )


def random_steps(seed: int, *, rows: int, picks: int, count: int) -> list[list[list[int]]]:
    rng = np.random.default_rng(seed)
    return [[sorted(rng.permutation(rows)[:picks].tolist())] for _ in range(count)]


def lru_misses(workload: Workload, slots: int, *, warm: bool = False) -> list[int]:
    policy = PlannerArena(workload, slots=slots, top_k=32)
    return laboratory.run(workload, {"lru": policy}, start=Start(warm=warm))["lru"].misses


@pytest.mark.parametrize("slots", [64, 128, 192])
def test_planner_lru_is_the_lru_of_a_dictionary(slots: int) -> None:
    workload = generated(SMALL, QUIET)
    expected = lru_bruteforce.lru_misses(workload, slots=slots)
    assert lru_misses(workload, slots) == expected
    assert sum(expected[5:]) > 0


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_min_is_optimal_by_exhaustive_search(seed: int, *, bypass: bool) -> None:
    for slots, picks in ((4, 3), (5, 2)):
        steps = random_steps(seed, rows=8, picks=picks, count=9)
        workload = workload_of(steps, row_count=8)
        future = next_uses(workload)
        policy = Min(workload, slots=slots, future=future, bypass=bypass)
        misses = sum(laboratory.run(workload, {"min": policy})["min"].misses)
        assert misses == lru_bruteforce.fewest_misses(workload, slots=slots, bypass=bypass)


def test_bypass_needs_no_more_than_forced_and_both_no_more_than_lru() -> None:
    workload = generated(SMALL, QUIET)
    future = next_uses(workload)
    policies = {
        "lru": PlannerArena(workload, slots=64, top_k=32),
        "forced": Min(workload, slots=64, future=future),
        "bypass": Min(workload, slots=64, future=future, bypass=True),
    }
    total = {k: sum(v.misses) for k, v in laboratory.run(workload, policies).items()}
    assert total["bypass"] <= total["forced"] < total["lru"]


class BruteSieve:
    """One row at a time, a Python list and a hand; newcomers of a step join at its end."""

    def __init__(self, slots: int) -> None:
        self.slots, self.line, self.visited, self.hand = slots, [], {}, 0

    def access(self, rows: list[int]) -> int:
        for row in rows:
            if row in self.visited:
                self.visited[row] = True
        absent = [row for row in rows if row not in self.visited]
        for _ in range(max(0, len(self.line) + len(absent) - self.slots)):
            self.evict_one(set(rows))
        if self.hand == len(self.line):
            self.hand = 0
        for row in absent[: self.slots - len(self.line)]:
            self.line.append(row)
            self.visited[row] = False
        return len(absent)

    def evict_one(self, pinned: set[int]) -> None:
        for _ in range(2 * len(self.line)):
            self.hand %= len(self.line)
            row = self.line[self.hand]
            if not self.visited[row] and row not in pinned:
                del self.line[self.hand], self.visited[row]
                return
            self.visited[row] = False
            self.hand += 1


@pytest.mark.parametrize(("slots", "seed"), [(6, 0), (9, 1), (12, 2), (20, 3)])
def test_sieve_is_a_hand_that_walks_a_list(slots: int, seed: int) -> None:
    steps = random_steps(seed, rows=40, picks=5, count=200)
    workload = workload_of(steps, row_count=40)
    sieve = BruteSieve(slots)
    expected = [sieve.access(rows[0]) for rows in steps]
    misses = laboratory.run(workload, {"sieve": Sieve(workload, slots=slots)})["sieve"].misses
    assert misses == expected
    assert len(set(expected)) > 1


def test_fifo_ignores_hits_and_score_ema_keeps_what_scores_well() -> None:
    workload = workload_of([[[0, 1]], [[0, 2]], [[0, 3]], [[0, 1]]], row_count=4)
    misses = laboratory.run(workload, {"fifo": Fifo(workload, slots=3)})["fifo"].misses
    assert misses == [2, 1, 1, 1], "0 is the oldest admission but pinned, so 1 gave way"

    def scored() -> Iterator[Step]:
        for step, scores in zip(
            workload.steps(), ([9, 9, 0, 0], [9, 8, 1, 0], [9, 8, 1, 1], [9, 9, 0, 0]), strict=True
        ):
            yield Step(rows=step.rows, fresh=step.fresh, scores=np.array(scores, np.float32))

    known = Workload(
        name="scored",
        row_count=4,
        query_count_max=1,
        step_count=4,
        windows=workload.windows,
        steps=scored,
    )
    misses = laboratory.run(known, {"ema": ScoreEma(known, slots=3)})["ema"].misses
    assert misses == [2, 1, 1, 0], "2 scored worst and gave way, so 1 is still here"


def test_score_ema_refuses_a_workload_without_scores() -> None:
    workload = workload_of([[[0, 1]]], row_count=4)
    with pytest.raises(BadInput, match="SelectionEma"):
        laboratory.run(workload, {"ema": ScoreEma(workload, slots=3)})
    with pytest.raises(BadInput, match="what to fetch"):
        laboratory.run(workload, {"fifo": Fifo(workload, slots=3)}, start=Start(ahead=1))


def test_more_rows_than_slots_are_served_in_place() -> None:
    workload = workload_of([[[0, 1, 2, 3]], [[0, 1, 2, 3]]], row_count=8)
    makers = (Fifo, Random, SelectionEma, Sieve)
    policies = {maker.__name__: maker(workload, slots=3) for maker in makers}
    policies["min"] = Min(workload, slots=3, future=next_uses(workload))
    for name, outcome in laboratory.run(workload, policies).items():
        assert outcome.misses == [4, 1], name


def test_warm_up_removes_the_cold_start_and_fetching_ahead_is_counted() -> None:
    workload = generated(SMALL, QUIET)
    policy = PlannerArena(workload, slots=128, top_k=32)
    cold, warm = lru_misses(workload, 128), lru_misses(workload, 128, warm=True)
    assert warm[0] < cold[0] / 2
    replayed = lru_bruteforce.lru_misses(workload, slots=128, warm=True)
    assert warm[0] == replayed[0], "the same rows at the same ages, though in other slots"
    assert sum(warm) == pytest.approx(sum(replayed), rel=0.05)
    start = Start(warm=True, ahead=6)
    ahead = laboratory.run(workload, {"lru": policy}, start=start)["lru"]
    assert sum(ahead.misses) < sum(warm)
    assert 0 < ahead.useful_count <= ahead.ahead_count <= 6 * SMALL.step_count
    assert sum(warm) - sum(ahead.misses) <= ahead.useful_count


@pytest.mark.parametrize("recent", [0, 2])
def test_the_curve_equals_simulation_at_every_size(recent: int) -> None:
    """Its own tie rule, simulated with a list: position ascending is youngest."""
    load = RequestLoad(context=300, step_count=30, query_count=2, top_k=24, recent=recent, seed=2)
    workload = generated(load, LayerProfile(hot=60, cold=2, drift=0.5))
    curve = miss_curve(workload)
    assert 24 <= curve.slots_min <= 50
    for slots in range(curve.slots_min, workload.row_count + 1, 31):
        missed = np.mean(lru_bruteforce.recency_misses(workload, slots=slots))
        assert curve.at(slots) == pytest.approx(missed, abs=1e-12)
    with pytest.raises(BadInput, match="fewer than"):
        curve.at(curve.slots_min - 1)


@pytest.mark.parametrize("step_count", [60, 330])
def test_the_planner_lies_between_the_bounds_of_the_curve(step_count: int) -> None:
    """Beyond 255 steps ages saturate, and the bounds know it."""
    load = RequestLoad(context=600, step_count=step_count, query_count=2, top_k=32, seed=4)
    workload = generated(load, LayerProfile(hot=90, cold=4, drift=1.0))
    curve = miss_curve(workload)
    for slots in (64, 128, 192, 320, 448):
        planner = np.mean(lru_misses(workload, slots))
        assert curve.lowest[slots] - 1e-9 <= planner <= curve.highest[slots] + 1e-9
        assert curve.lowest[slots] <= curve.exact[slots] <= curve.highest[slots]
        assert planner == pytest.approx(curve.at(slots), rel=0.05)


def test_rows_of_a_request_that_has_ended_are_no_hits_of_the_next() -> None:
    """It gets the same row numbers. Others that run meanwhile keep theirs, and their order."""
    steps = [
        Step(rows=ids([0, 1], [6, 7]), fresh=ids()),
        Step(rows=ids([2, 3], [6, 8]), fresh=ids(), ended=((0, 4),)),
        Step(rows=ids([0, 1], [6, 7]), fresh=ids()),
        Step(rows=ids([0, 1], [6, 7]), fresh=ids(), ended=((4, 9), (0, 4))),
        Step(rows=ids([6, 7], [0, 1]), fresh=ids()),
    ]
    workload = replace(workload_of([[[0], [0]]] * 5, row_count=9), steps=lambda: iter(steps))
    missed = [4, 3, 2, 0, 4]
    assert lru_misses(workload, 64) == missed
    curve = miss_curve(workload)
    for each in (curve.exact, curve.lowest, curve.highest):
        assert each[8] == pytest.approx(sum(missed) / 5)
    assert miss_curve(workload, skip=3).at(8) == pytest.approx(2.0)
    with pytest.raises(BadInput, match="skip 5 of 5 steps"):
        miss_curve(workload, skip=5)


def ids(*rows: list[int]) -> np.ndarray:
    return np.array(rows, np.int32)
