"""Rows that were evicted under pressure, lost by preemption or never fitted come back when slots
are free.

Called behind every step, a refill walks through one sequence with absent rows and starts copies
into free slots. It stays behind the steps: it looks at `LOOK_PAGES` pages in `GROUPS` groups and
starts at most `FILL_ROWS` rows of each, since these copies queue before the fetches of the next
step. It leaves a tenth of every group's slots free, so it never makes slots scarce; its rows rank
as the oldest, and no row gives way to them: a wrong guess costs a copy.

Only what the host has learned is copied: rows below `length` are on the host, or in slots until
they are. So steps that are sealed and not learned need not be waited for. (The MTP module's row may
be missing on the host; then it stays absent.)
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Final

from ess.array_types import RowIds
from ess.door.memory.pools import HostPools
from ess.door.residency import row_copies
from ess.door.residency.resident import Resident
from ess.door.residency.walks import Walk, Walks
from ess.door.sequences.sequence import Sequence
from ess.pool.lru.arena import FetchPlan
from ess.units import PAGE_ROWS

GROUPS: Final = 8
LOOK_PAGES: Final = 128
FILL_ROWS: Final = 64 * PAGE_ROWS


class Refill:
    def __init__(self, pools: HostPools, resident: Resident) -> None:
        self.pools = pools
        self.resident = resident
        self._walks = Walks(LOOK_PAGES)

    def go_on(self, sequences: Many[Sequence]) -> list[FetchPlan]:
        """Starts copies for one sequence and returns them."""
        spare = self.resident.rooms()
        active = [sequence for sequence in sequences if sequence.state == "active"]
        if not active or not (spare > 0).any():
            return []
        lacking = self.resident.lacking(active)
        going = self._walks.next(lacking, self.pools.sparse.departed_count)
        if going is None:
            return []
        rooms = {group: room for group, room in enumerate(spare.tolist()) if room > 0}
        return self._walk_on(*going, rooms)

    def _walk_on(self, sequence: Sequence, walk: Walk, rooms: Mapping[int, int]) -> list[FetchPlan]:
        """Looks once; the next look is further on, unless more rows were absent than may start at
        once."""
        rows, start = self._walks.rows(sequence, walk), walk.page * PAGE_ROWS
        plans, is_bounded = [], False
        groups = [group for group in rooms if group >= walk.group]
        for group in groups[:GROUPS]:
            skip = self.pools.layout.first_read(group, sequence.length) - start
            read = rows[max(0, skip) :]
            absent = read[self.pools.sparse.slot_of[group].take(read) < 0]
            first = absent[:FILL_ROWS]
            first = first[self.pools.are_stored(group, first)][: rooms[group]]
            if len(first):
                plans.append(self._start(group, first))
            is_bounded |= len(absent) > FILL_ROWS == len(first)
        if not is_bounded and self._walks.turn(sequence, walk, next(iter(groups[GROUPS:]), 0)):
            self.resident.forget(sequence)
        assert len(plans) <= GROUPS, f"{len(plans)} groups were filled at once"
        return plans

    def _start(self, group: int, rows: RowIds) -> FetchPlan:
        assert 0 < len(rows) <= FILL_ROWS, f"{len(rows)} rows of group {group} in one copy"
        plan = self.pools.sparse.fill(group, rows)
        assert len(plan.rows) == len(rows), f"{len(rows)} rows, {len(plan.rows)} free slots"
        assert plan.evicted_count == 0, "a row has given way to a refill"
        row_copies.start_fetch(self.pools, plan, self.pools.index.host_rows(plan.rows))
        return plan

    def check(self) -> None:
        sparse = self.pools.sparse
        self._walks.check(self.pools.layout.group_count, sparse.departed_count)
