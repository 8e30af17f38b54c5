"""Rows without a slot come back when slots are free again: `ess.door.residency.refill` on a device.

Only the device knows which rows are absent, so a walk offers stretches of a sequence's rows, and
kernels take the absent ones. A stretch is offered only if all of it fits and a tenth of the slots
stays free, and only while no landing is under way.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Final

from ess.door.device.memory.device_pools import DevicePools
from ess.door.device.residency.knowledge import Knowledge
from ess.door.device.residency.landings import Landings
from ess.door.sequences.sequence import Sequence
from ess.pool.device_bytes import LANDINGS
from ess.units import PAGE_ROWS

LOOK_PAGES: Final = 64


@dataclass(slots=True)
class _Walk:
    """Continues at `page` and `group`. `rests_at` is how many rows had been evicted since the start
    when the walk last came around: it rests until further rows are evicted."""

    arrival_count: int
    page: int = 0
    group: int = 0
    rests_at: int = -1


class DeviceRefill:
    def __init__(self, pools: DevicePools, landings: Landings, knowledge: Knowledge) -> None:
        self._pools = pools
        self._landings = landings
        self._knowledge = knowledge
        self._walks: dict[int, _Walk] = {}

    def go_on(self, sequences: Many[Sequence]) -> int:
        """How many rows were offered, all of one sequence."""
        self._knowledge.all_resident(sequences)
        self._landings.go_on()
        if self._landings.is_busy:
            return 0
        lacking = [each for each in sequences if self._knowledge.lacks(each)]
        self._walks = {each.number: self._walk(each) for each in lacking}
        evicted = int(self._pools.counting.counts("evicted").sum())
        for sequence in lacking:
            walk = self._walks[sequence.number]
            if walk.rests_at != evicted:
                return self._walk_on(sequence, walk, evicted)
        return 0

    def _walk(self, sequence: Sequence) -> _Walk:
        walk = self._walks.get(sequence.number)
        if walk is None or walk.arrival_count != sequence.arrival_count:
            return _Walk(sequence.arrival_count)
        return walk

    def _walk_on(self, sequence: Sequence, walk: _Walk, evicted: int) -> int:
        start, room = walk.page * PAGE_ROWS, self._knowledge.room()
        count = min(LOOK_PAGES * PAGE_ROWS, sequence.length - start)
        rows = sequence.holding.row_ids(start, count) if count > 0 else None
        group_count, offered = self._pools.layout.group_count, 0
        last = min(walk.group + LANDINGS, group_count)
        for group in range(walk.group, last):
            if rows is not None and room[group] >= len(rows):
                stored = rows[self._pools.are_stored(group, rows)]
                self._landings.fill(sequence, group, stored)
                offered += len(stored)
        self._landings.go_on()
        self._turn(walk, sequence, last, evicted)
        return offered

    def _turn(self, walk: _Walk, sequence: Sequence, group: int, evicted: int) -> None:
        """Moves the walk on: to later groups, to further pages, or back to the first."""
        walk.group = group % self._pools.layout.group_count
        if walk.group:
            return
        walk.page += LOOK_PAGES
        if walk.page * PAGE_ROWS >= sequence.length:
            walk.page, walk.rests_at = 0, evicted
            self._knowledge.forget(sequence)

    def forget_all(self) -> None:
        """Groups have other slots now: walks that rest start again."""
        self._walks.clear()

    def check(self) -> None:
        for number, walk in self._walks.items():
            assert walk.page % LOOK_PAGES == 0, f"sequence {number}: a walk at page {walk.page}"
            assert 0 <= walk.group < self._pools.layout.group_count, f"sequence {number}: {walk}"
