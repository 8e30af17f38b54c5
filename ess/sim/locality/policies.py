"""Eviction policies on one workload, in lockstep, all under the planner's batch rules.

A step first writes its new rows, then stamps the resident rows, and only then looks for victims; no
row of the step can be a victim. Rows that find no victim are served in place: they miss and are not
admitted.

`PlannerArena` is no model but the product: `ess.pool.lru.planner` on a real arena. The others rank
rows and evict the lowest; SIEVE walks. Policies that know the future are in `oracles`.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput
from ess.pool.lru import planner
from ess.pool.lru.arena import BLOCK_SLOTS, Arena, Split
from ess.pool.lru.eviction import PolicyName, follow
from ess.pool.warmup import last_windows, warm_set
from ess.sim.locality.selections import COLD_SCORE, Ints
from ess.sim.locality.workloads import Step, Workload, distinct

EMA_WEIGHT: Final = 0.2

Flags = npt.NDArray[np.bool_]


class Policy(Protocol):
    """The arena of one policy. Rows given to `fill` and `fetch_ahead` are distinct."""

    def fill(self, rows: Ints) -> None:
        """Puts rows into free slots while there are any; they are the first to give way."""

    def warm(self, windows: Ints) -> None:
        """Replays windows, oldest first, as selections before the first step."""

    def access(self, step: Step) -> Ints:
        """One step; returns the rows that missed, each once."""

    def fetch_ahead(self, rows: Ints) -> Ints:
        """Admits absent rows, best first, as if used one step ago; returns those that came in."""

    def resident(self) -> Flags: ...

    def drop(self, start: int, stop: int) -> None: ...


class PlannerArena:
    """A policy of the product, exact batch LRU or another, run by its own planner."""

    def __init__(
        self, workload: Workload, *, slots: int, top_k: int, evict: PolicyName = "lru"
    ) -> None:
        if slots < BLOCK_SLOTS or slots % BLOCK_SLOTS:
            raise BadInput(f"{slots} slots are not whole blocks of {BLOCK_SLOTS}")
        self._arena = Arena.alone(row_count=workload.row_count, slot_count=slots, evict=evict)
        self._split = Split.create(query_count=workload.query_count_max, top_k=top_k)
        self._step = 0

    def fill(self, rows: Ints) -> None:
        claims = planner.fill(self._arena, rows, step=self._step, ticket=1)
        planner.land(self._arena, claims.slots, ticket=1)

    def warm(self, windows: Ints) -> None:
        self._step += len(windows)
        if len(windows):
            chosen = warm_set(*last_windows(windows), len(windows))
            self._warm(chosen.positions, chosen.ages)

    def access(self, step: Step) -> Ints:
        self._step += 1
        written = np.empty(step.fresh.size, np.int32)
        claimed = planner.claim_new(self._arena, step.fresh, step=self._step, out=written)
        rows = np.ascontiguousarray(step.rows)
        if self._arena.eviction.name == "score":
            self._observe(step)
        claims = planner.plan(self._arena, rows, step=self._step, ticket=1, split=self._split)
        place = distinct(self._split.place[: len(rows), : rows.shape[1]])
        planner.land(self._arena, claims.slots, ticket=1)
        if claimed:
            planner.settle(self._arena, written)
        return np.concatenate([claims.rows, place])

    def _observe(self, step: Step) -> None:
        if step.seen is None:
            raise BadInput(
                "this workload carries no quantised scores: score cannot be judged by it"
            )
        for rows, scores in step.seen:
            follow(self._arena.eviction.rank_of, rows, scores.astype(np.int64))

    def fetch_ahead(self, rows: Ints) -> Ints:
        return self._warm(rows, np.ones(rows.size, np.int32))

    def resident(self) -> Flags:
        held: Flags = self._arena.slot_of >= 0
        return held

    def drop(self, start: int, stop: int) -> None:
        planner.drop(self._arena, np.arange(start, stop, dtype=np.int32))

    def _warm(self, rows: Ints, ages: Ints) -> Ints:
        """Warms; ages count from the next step."""
        claims = planner.warm(self._arena, rows, ages, step=self._step + 1, ticket=1)
        planner.land(self._arena, claims.slots, ticket=1)
        return claims.rows


class Ranked:
    """Evicts the lowest rank; among equal ranks the lowest row id. Subclasses define the rank."""

    def __init__(self, workload: Workload, *, slots: int) -> None:
        if slots < 1:
            raise BadInput(f"an arena of {slots} slots holds nothing")
        self._slots = slots
        self._held = np.zeros(workload.row_count, bool)
        self._pinned = np.zeros(workload.row_count, bool)
        self._count = 0
        self._rank: npt.NDArray[Any] = np.zeros(workload.row_count, np.float32)

    def fill(self, rows: Ints) -> None:
        absent = rows[~self._held[rows]]
        self._admit(absent[: self._slots - self._count])

    def warm(self, windows: Ints) -> None:
        for window in windows:
            self._take(distinct(window), np.empty(0, np.int32), step=None)

    def access(self, step: Step) -> Ints:
        return self._take(distinct(step.rows), step.fresh, step=step)

    def fetch_ahead(self, rows: Ints) -> Ints:
        return self._admit(rows[~self._held[rows]])

    def resident(self) -> Flags:
        return self._held

    def drop(self, start: int, stop: int) -> None:
        self._count -= int(np.count_nonzero(self._held[start:stop]))
        self._held[start:stop] = False

    def _take(self, selected: Ints, fresh: Ints, *, step: Step | None) -> Ints:
        self._pinned[fresh] = True
        self._admit(fresh[~self._held[fresh]])
        self._pinned[selected] = True
        missing = selected[~self._held[selected]]
        self._observe(selected, step)
        self._admit(missing)
        self._pinned[selected] = self._pinned[fresh] = False
        return missing

    def _observe(self, selected: Ints, step: Step | None) -> None:
        """Updates ranks before anything gives way; `step` is None for a warm-up window."""

    def _admit(self, rows: Ints) -> Ints:
        """Admits as many of the rows as find a slot."""
        wanted = self._count + rows.size - self._slots
        victims = self._victims(wanted) if wanted > 0 else np.empty(0, np.int64)
        self._held[victims] = False
        self._count -= victims.size
        rows = rows[: self._slots - self._count]
        self._held[rows] = True
        self._count += rows.size
        self._came_in(rows)
        return rows

    def _came_in(self, rows: Ints) -> None:
        """Called after rows were admitted."""

    def _victims(self, wanted: int) -> npt.NDArray[np.int64]:
        candidates = np.flatnonzero(self._held & ~self._pinned)
        if candidates.size <= wanted:
            return candidates
        rank = self._rank[candidates]
        bound = np.partition(rank, wanted - 1)[wanted - 1]
        below = candidates[rank < bound]
        return np.concatenate([below, candidates[rank == bound][: wanted - below.size]])


class Fifo(Ranked):
    """Evicts the oldest admission."""

    _admissions = 0

    def _came_in(self, rows: Ints) -> None:
        self._admissions += 1
        self._rank[rows] = self._admissions


class Random(Ranked):
    """Evicts any row, drawn from a fixed seed."""

    def __init__(self, workload: Workload, *, slots: int) -> None:
        super().__init__(workload, slots=slots)
        self._rng = np.random.default_rng(0)

    def _observe(self, selected: Ints, step: Step | None) -> None:
        self._rng.random(out=self._rank, dtype=np.float32)


class ScoreEma(Ranked):
    """Evicts the lowest moving average of indexer scores. It needs full scores, which traces do not
    hold: with scored traces `PlannerArena` under score uses the bytes that they do hold."""

    def __init__(self, workload: Workload, *, slots: int) -> None:
        super().__init__(workload, slots=slots)
        self._rank[:] = COLD_SCORE

    def _observe(self, selected: Ints, step: Step | None) -> None:
        if step is None:
            self._rank[selected] = np.maximum(self._rank[selected], 0)
        elif step.scores is None:
            raise BadInput("this workload carries no indexer scores; use SelectionEma instead")
        else:
            self._rank += np.float32(EMA_WEIGHT) * (step.scores - self._rank)


class SelectionEma(Ranked):
    """Evicts the lowest moving average of being selected, which is all that a plain trace shows."""

    def _observe(self, selected: Ints, step: Step | None) -> None:
        self._rank *= 1 - EMA_WEIGHT
        self._rank[selected] += EMA_WEIGHT


class Sieve(Ranked):
    """A hand walks from the oldest admission to the newest and spares selected rows once.

    `order` holds the residents, oldest first. The hand takes unvisited rows and clears the visits
    it passes; rows of the step are visited, so a first round never takes them, and a second round
    must not. At the end of the list the hand starts again before newcomers are appended.
    """

    def __init__(self, workload: Workload, *, slots: int) -> None:
        super().__init__(workload, slots=slots)
        self._order = np.empty(0, np.int64)
        self._visited = np.zeros(workload.row_count, bool)
        self._hand = 0

    def drop(self, start: int, stop: int) -> None:
        is_dropped = (self._order >= start) & (self._order < stop)
        self._remove(is_dropped, self._hand)
        super().drop(start, stop)

    def _observe(self, selected: Ints, step: Step | None) -> None:
        self._visited[selected[self._held[selected]]] = True

    def _came_in(self, rows: Ints) -> None:
        self._visited[rows] = False
        if self._hand == self._order.size:
            self._hand = 0
        self._order = np.concatenate([self._order, rows])

    def _victims(self, wanted: int) -> npt.NDArray[np.int64]:
        turn = np.roll(np.arange(self._order.size), -self._hand)
        walk = self._order[turn]
        first = np.flatnonzero(~self._visited[walk] & ~self._pinned[walk])[:wanted]
        if first.size == wanted:
            taken = passed = first
            self._visited[walk[: passed[-1] + 1]] = False
        else:
            self._visited[walk] = False
            spared = ~self._pinned[walk]
            spared[first] = False
            passed = np.flatnonzero(spared)[: wanted - first.size]
            taken = np.concatenate([first, passed])
        is_victim = np.zeros(self._order.size, bool)
        is_victim[turn[taken]] = True
        self._remove(is_victim, int(turn[passed[-1]]) + 1 if passed.size else self._hand)
        return walk[taken]

    def _remove(self, gone: npt.NDArray[np.bool_], hand: int) -> None:
        self._hand = hand - int(np.count_nonzero(gone[:hand]))
        self._order = self._order[~gone]
