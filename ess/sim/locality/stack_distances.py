"""Misses at every arena size, from one pass over a workload.

Batch LRU is a stack algorithm. Keep all rows in one list, newest use first. A step moves the rows
that it selects to the front and keeps the order of the rest. Then an arena of C slots always holds
the first C rows of the list, so a selected row hits exactly in arenas larger than its place:

    Before the step the arena holds the first C. It stamps its hits and evicts, from the back, as
    many unselected rows as it misses. What remains are the selected rows and the first C - |U|
    others, and these are the first C of the new list. This needs |U| <= C, so a curve begins at
    the largest union of a step and refuses anything below.

Rows of one step are ordered by row id here; the planner breaks such ties by slot, and its ages end
at 255. No tie rule moves a row past rows of another age, so for each selected row two counts bound
every rule: the rows of lesser age, and these plus all rows of its own age. `lowest` and `highest`
are the curves from these bounds, and the planner's misses lie between them. The counts need only
the number of rows per age, never their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput
from ess.pool.budget import Curve
from ess.pool.lru.arena import AGE_MAX
from ess.sim.locality.selections import Ints
from ess.sim.locality.workloads import Workload, distinct

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MissCurve:
    """Mean misses per step by slots: `exact[slots]`, right for `slots >= slots_min`."""

    slots_min: int
    exact: Curve
    lowest: Curve
    highest: Curve

    def at(self, slots: int) -> float:
        if slots < self.slots_min:
            raise BadInput(f"{slots} slots are fewer than the {self.slots_min} rows of one step")
        return float(self.exact[min(slots, self.exact.size - 1)])


def miss_curve(workload: Workload, *, skip: int = 0, filled: Ints | None = None) -> MissCurve:
    """The curve over all steps but the first `skip`; `filled` rows are resident at the start.

    An arena of C slots starts with the first C of `filled`; without them all arenas start empty.
    """
    if not 0 <= skip < workload.step_count:
        raise BadInput(f"skip {skip} of {workload.step_count} steps leaves none to count")
    recency = _Recency(workload, np.empty(0, np.int32) if filled is None else filled)
    bins = np.zeros((3, workload.row_count + 2), np.int64)
    slots_min = 0
    for number, step in enumerate(workload.steps()):
        selected = distinct(step.rows)
        recency.stamp(step.fresh, number)
        bounds = recency.bounds(selected, number)
        places = recency.stamp(selected, number)
        if number >= skip:
            for kind, distances in enumerate((places, *bounds)):
                bins[kind] += np.bincount(distances, minlength=bins.shape[1])
        slots_min = max(slots_min, np.union1d(selected, step.fresh).size)
        recency.drop(step.ended)
    curves = np.cumsum(bins[:, ::-1], axis=1)[:, ::-1] / (workload.step_count - skip)
    return MissCurve(slots_min=slots_min, exact=curves[0], lowest=curves[1], highest=curves[2])


class _Recency:
    """All rows ever used, newest use first, and how many were last used at each step."""

    def __init__(self, workload: Workload, filled: Ints) -> None:
        self._absent = workload.row_count + 1
        self._stack = filled.astype(np.int32)
        self._marked = np.zeros(workload.row_count, bool)
        self._last = np.full(workload.row_count, -1, np.int32)
        self._last[filled] = 0
        self._count = np.zeros(workload.step_count + 1, np.int64)
        self._count[0] = filled.size

    def stamp(self, rows: Ints, number: int) -> Places:
        """Moves distinct rows to the front; returns the places they had, in no order."""
        self._marked[rows] = True
        is_moved = self._marked[self._stack]
        places = np.flatnonzero(is_moved)
        self._stack = np.concatenate([rows, self._stack[~is_moved]])
        self._marked[rows] = False
        known = self._last[rows]
        self._count -= np.bincount(known[known >= 0], minlength=self._count.size)
        self._last[rows] = number + 1
        self._count[number + 1] += rows.size
        return np.concatenate([places, np.full(rows.size - places.size, self._absent)])

    def bounds(self, rows: Ints, number: int) -> tuple[Places, Places]:
        """The least and the greatest place that any tie rule can give each row."""
        last = self._last[rows]
        oldest = max(0, number + 1 - AGE_MAX)
        age_class = np.maximum(last, oldest)
        reach = np.cumsum(self._count[::-1])[::-1]
        younger = np.append(reach, 0)[age_class + 1]
        upto = np.where(age_class == oldest, reach[0], reach[age_class])
        absent = last < 0
        least = np.where(absent, self._absent, younger)
        return least, np.where(absent, self._absent, upto - 1)

    def drop(self, ended: Sequence[tuple[int, int]]) -> None:
        for start, stop in ended:
            last = self._last[start:stop]
            self._count -= np.bincount(last[last >= 0], minlength=self._count.size)
            last[:] = -1
            self._stack = self._stack[(self._stack < start) | (self._stack >= stop)]
