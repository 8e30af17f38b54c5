"""Policies that know the future: MIN, forced and with bypass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ess.sim.locality.policies import Ranked
from ess.sim.locality.selections import Ints
from ess.sim.locality.workloads import Step, Workload, distinct

NEVER: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NextUses:
    """For every step, the next use of each row that it selects; `first` is each row's first."""

    first: Ints
    after: tuple[Ints, ...]


def next_uses(workload: Workload) -> NextUses:
    selections = [distinct(step.rows) for step in workload.steps()]
    upcoming = np.full(workload.row_count, NEVER, np.int32)
    after: list[Ints] = []
    for number in range(len(selections) - 1, -1, -1):
        after.append(upcoming[selections[number]])
        upcoming[selections[number]] = number
    return NextUses(first=upcoming, after=tuple(reversed(after)))


class Min(Ranked):
    """Evicts the row whose next use is farthest; the rows of the step are forced resident.

    Optimal by exchange: were another row evicted instead, swapping the two from here to the farther
    use would never add a miss. With `bypass` rows that just missed may leave at once, and the arena
    keeps, of all it has seen in this step, the rows used soonest.
    """

    def __init__(
        self, workload: Workload, *, slots: int, future: NextUses, bypass: bool = False
    ) -> None:
        super().__init__(workload, slots=slots)
        self._future, self._number, self._bypass = future, 0, bypass
        self._rank = -future.first

    def access(self, step: Step) -> Ints:
        if not self._bypass:
            missing = super().access(step)
        else:
            missing = self._keep_soonest(distinct(step.rows), step)
        self._number += 1
        return missing

    def _observe(self, selected: Ints, step: Step | None) -> None:
        if step is not None:
            self._rank[selected] = -self._future.after[self._number]

    def _keep_soonest(self, selected: Ints, step: Step) -> Ints:
        before = self._held.copy()
        before[step.fresh] = True
        missing = selected[~before[selected]]
        self._observe(selected, step)
        before[selected] = True
        seen = np.flatnonzero(before)
        kept = seen[np.argsort(-self._rank[seen], kind="stable")[: self._slots]]
        self._held[:] = False
        self._held[kept] = True
        self._count = kept.size
        return missing
