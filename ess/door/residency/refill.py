"""Rows that were evicted under pressure, lost by preemption or never fitted come back when slots
are free.

Called behind every step, a refill walks through one sequence with absent rows and starts copies
into free slots. It stays behind the steps: it looks at `LOOK_PAGES` pages in `GROUPS` groups and
starts at most `FILL_ROWS` rows of each, since these copies queue before the fetches of the next
step. It leaves a tenth of every group's slots free, so it never makes slots scarce; its rows rank
as the oldest, and no row gives way to them: a wrong guess costs a copy.

A walk that came around rests until a row has departed since it began, slots have changed their
group or rows have arrived from elsewhere. (Slots of rejected drafts are for the next drafts.)
Without that, a sequence that a small group can never hold would be looked through in every step.

Only what the host has learned is copied: rows below `length` are on the host, or in slots until
they are. So steps that are sealed and not learned need not be waited for. (The MTP module's row may
be missing on the host; then it stays absent.)
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from ess.array_types import RowIds
from ess.door.memory.pools import HostPools
from ess.door.residency import row_copies
from ess.door.residency.resident import Resident
from ess.door.sequences.sequence import Sequence
from ess.pool.lru.arena import FetchPlan
from ess.units import PAGE_ROWS

GROUPS: Final = 8
LOOK_PAGES: Final = 128
FILL_ROWS: Final = 64 * PAGE_ROWS


@dataclass(slots=True)
class _Walk:
    """Goes on at `page` and `group`. It began, and rests, at a count of departed rows; new arrivals
    end it."""

    arrival_count: int
    page: int = 0
    group: int = 0
    began_at: int = -1
    rests_at: int = -1


@dataclass(slots=True)
class Refill:
    pools: HostPools
    resident: Resident
    _walks: dict[int, _Walk] = field(default_factory=dict)

    def go_on(self, sequences: Many[Sequence]) -> list[FetchPlan]:
        """Starts copies for one sequence and returns them."""
        spare = self.resident.rooms()
        active = [sequence for sequence in sequences if sequence.state == "active"]
        if not active or not (spare > 0).any():
            return []
        lacking = self.resident.lacking(active)
        self._walks = {sequence.number: self._walk(sequence) for sequence in lacking}
        rooms = {group: room for group, room in enumerate(spare.tolist()) if room > 0}
        for sequence in lacking:
            walk = self._walks[sequence.number]
            if walk.rests_at != self.pools.sparse.departed_count:
                return self._walk_on(sequence, walk, rooms)
        return []

    def _walk(self, sequence: Sequence) -> _Walk:
        walk = self._walks.get(sequence.number)
        if walk is None or walk.arrival_count != sequence.arrival_count:
            return _Walk(sequence.arrival_count)
        return walk

    def _walk_on(
        self, sequence: Sequence, walk: _Walk, rooms: Mapping[int, int]
    ) -> list[FetchPlan]:
        """Looks once; the next look is further on, unless more rows were absent than may start at
        once."""
        if walk.page == walk.group == 0:
            walk.began_at = self.pools.sparse.departed_count
        start = walk.page * PAGE_ROWS
        count = min(LOOK_PAGES * PAGE_ROWS, sequence.length - start)
        assert count > 0, f"a walk at {start} of {sequence.length} positions"
        rows = sequence.holding.row_ids(start, count)
        plans, is_bounded = [], False
        groups = [group for group in rooms if group >= walk.group]
        for group in groups[:GROUPS]:
            skip = self.pools.layout.first_read(group, sequence.length) - start
            read = rows[max(0, skip) :]
            absent = read[self.pools.sparse.slot_of[group].take(read) < 0]
            first = absent[:FILL_ROWS]
            first = first[self._are_stored(group, first)][: rooms[group]]
            if len(first):
                plans.append(self._start(group, first))
            is_bounded |= len(absent) > FILL_ROWS == len(first)
        if not is_bounded:
            self._turn(walk, sequence, groups[GROUPS:])
        assert len(plans) <= GROUPS, f"{len(plans)} groups were filled at once"
        return plans

    def _turn(self, walk: _Walk, sequence: Sequence, later: Many[int]) -> None:
        """Moves the walk on: to later groups, to further pages, or back to the first."""
        assert walk.began_at >= 0, f"{sequence!r}: a walk goes on that never began"
        assert all(group > walk.group for group in later), f"{walk} goes back to {later}"
        if later:
            walk.group = later[0]
            return
        walk.group, walk.page = 0, walk.page + LOOK_PAGES
        if walk.page * PAGE_ROWS >= sequence.length:
            walk.page, walk.rests_at = 0, walk.began_at
            self.resident.forget(sequence)

    def _are_stored(self, group: int, rows: RowIds) -> npt.NDArray[np.bool_]:
        host_rows = self.pools.index.host_rows(rows)
        stored = np.ones(len(rows), np.bool_)
        for layer in self.pools.layout.groups[group]:
            stored &= self.pools.latent.is_stored(layer, host_rows)
        return stored

    def _start(self, group: int, rows: RowIds) -> FetchPlan:
        assert 0 < len(rows) <= FILL_ROWS, f"{len(rows)} rows of group {group} in one copy"
        plan = self.pools.sparse.fill(group, rows)
        assert len(plan.rows) == len(rows), f"{len(rows)} rows, {len(plan.rows)} free slots"
        assert plan.evicted_count == 0, "a row has given way to a refill"
        row_copies.start_fetch(self.pools, plan, self.pools.index.host_rows(plan.rows))
        return plan

    def check(self) -> None:
        for number, walk in self._walks.items():
            assert walk.page % LOOK_PAGES == 0, f"sequence {number}: a walk at page {walk.page}"
            assert 0 <= walk.group < self.pools.layout.group_count, f"sequence {number}: {walk}"
            assert walk.rests_at <= self.pools.sparse.departed_count, f"sequence {number}: {walk}"
