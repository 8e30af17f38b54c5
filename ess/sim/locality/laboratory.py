"""Runs policies on one workload in lockstep, with warm-up, filling and fetching ahead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ess.errors import BadInput
from ess.sim.locality.policies import Policy
from ess.sim.locality.selections import COLD_SCORE, Ints
from ess.sim.locality.workloads import Step, Workload


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Misses of every step, and rows fetched ahead: useful if a step selects them in time.

    A row that was fetched ahead and is still resident at the end, unused, counts as useless.
    """

    misses: list[int] = field(default_factory=list)
    ahead_count: int = 0
    useful_count: int = 0

    def mean(self, *, skip: int = 0) -> float:
        if not 0 <= skip < len(self.misses):
            raise BadInput(f"skip {skip} of {len(self.misses)} steps leaves none to count")
        return float(np.mean(self.misses[skip:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How arenas begin: warmed from the windows or not, then filled with other rows or not.

    After a step up to `ahead` absent rows with the best scores are fetched for the next step.
    """

    warm: bool = False
    fill: bool = False
    ahead: int = 0
    seed: int = 0


def run(
    workload: Workload, policies: Mapping[str, Policy], *, start: Start | None = None
) -> dict[str, Outcome]:
    """Every policy sees the same steps; each has its own arena."""
    start = start or Start()
    any_rows = np.random.default_rng([start.seed, 3]).permutation(workload.row_count)
    for policy in policies.values():
        if start.warm:
            policy.warm(workload.windows)
        if start.fill:
            policy.fill(any_rows.astype(np.int32))
    lanes = {name: _Lane(policy, workload.row_count) for name, policy in policies.items()}
    for step in workload.steps():
        for lane in lanes.values():
            lane.step(step, ahead=start.ahead)
    return {name: lane.outcome for name, lane in lanes.items()}


class _Lane:
    """One policy, and the rows that it fetched ahead."""

    def __init__(self, policy: Policy, row_count: int) -> None:
        self._policy = policy
        self._came_ahead = np.zeros(row_count, bool)
        self.outcome = Outcome()

    def step(self, step: Step, *, ahead: int) -> None:
        if ahead:
            self._count_useful(step)
        self.outcome.misses.append(self._policy.access(step).size)
        if ahead:
            fetched = self._policy.fetch_ahead(self._best_absent(step, ahead))
            self._came_ahead[fetched] = True
            self.outcome.ahead_count += fetched.size
        for first, last in step.ended:
            self._policy.drop(first, last)

    def _count_useful(self, step: Step) -> None:
        self._came_ahead &= self._policy.resident()
        selected = step.rows[step.rows >= 0]
        self.outcome.useful_count += int(np.unique(selected[self._came_ahead[selected]]).size)
        self._came_ahead[selected] = False

    def _best_absent(self, step: Step, count: int) -> Ints:
        if step.scores is None:
            raise BadInput("this workload carries no indexer scores: nothing says what to fetch")
        scores = np.where(self._policy.resident(), COLD_SCORE, step.scores)
        split = max(0, scores.size - count)
        best = np.argpartition(scores, min(split, scores.size - 1))[split:]
        best = best[scores[best] > COLD_SCORE]
        chosen: Ints = best[np.argsort(-scores[best], kind="stable")].astype(np.int32)
        return chosen
