"""LRU and MIN on small workloads, written a second time without code of the product.

The planner's LRU is a dictionary with slots that are searched, that of the curves is a list, and
MIN is the cheapest of all sets that an arena could hold after each step, by exhaustive search.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from ess.sim.locality.workloads import Step, Workload

AGE_MAX = 255


class DictionaryLru:
    """Slot -> (row, step of its last use). Free slots first, then the oldest, then the lowest."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots))
        self._held: dict[int, tuple[int, int]] = {}
        self._now = 0

    def step(self, step: Step) -> int:
        self._now += 1
        for row in step.fresh.tolist():
            self._touch([row])
        return self._touch(_in_order(step))

    def window(self, positions: Iterable[int]) -> None:
        self._now += 1
        self._touch([row for row in positions if row >= 0])

    def _touch(self, rows: list[int]) -> int:
        where = {row: slot for slot, (row, _) in self._held.items()}
        for row in rows:
            if row in where:
                self._held[where[row]] = (row, self._now)
        absent = [row for row in rows if row not in where]
        for row in absent:
            self._place(row)
        return len(absent)

    def _place(self, row: int) -> None:
        if self._free:
            slot = self._free.pop(0)
        else:
            ages = [
                (-min(self._now - used, AGE_MAX), slot)
                for slot, (_, used) in self._held.items()
                if used < self._now
            ]
            if not ages:
                return
            slot = min(ages)[1]
        self._held[slot] = (row, self._now)


def lru_misses(workload: Workload, *, slots: int, warm: bool = False) -> list[int]:
    arena = DictionaryLru(slots)
    for window in workload.windows if warm else ():
        arena.window(window.tolist())
    return [arena.step(step) for step in workload.steps()]


def recency_misses(workload: Workload, *, slots: int) -> list[int]:
    """Batch LRU as a list, newest first; of the rows of a step the lower id is the younger."""
    held: list[int] = []
    missed = []
    for step in workload.steps():
        selected = sorted(_in_order(step))
        held = _to_front(step.fresh.tolist(), held)[:slots]
        missed.append(len(set(selected) - set(held)))
        held = _to_front(selected, held)[:slots]
    return missed


def _to_front(rows: list[int], held: list[int]) -> list[int]:
    named = set(rows)
    return [*rows, *(row for row in held if row not in named)]


def fewest_misses(workload: Workload, *, slots: int, bypass: bool) -> int:
    """The fewest over all policies. Forced: a step's rows are resident after it, if they fit.

    Rows that a step writes itself are resident without a fetch.
    """
    costs: dict[frozenset[int], int] = {frozenset(): 0}
    for step in workload.steps():
        wanted, fresh = frozenset(_in_order(step)), frozenset(step.fresh.tolist())
        after: dict[frozenset[int], int] = {}
        for held, cost in costs.items():
            total, seen = cost + len(wanted - held - fresh), held | wanted | fresh
            for kept in itertools.combinations(seen, min(slots, len(seen))):
                state = frozenset(kept)
                if bypass or wanted | fresh <= state:
                    after[state] = min(after.get(state, total), total)
        costs = after
    return min(costs.values())


def _in_order(step: Step) -> list[int]:
    return list(dict.fromkeys(int(row) for row in step.rows.reshape(-1) if row >= 0))
