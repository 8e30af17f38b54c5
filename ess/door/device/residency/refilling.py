"""Rows without a slot come back when slots are free again: `ess.door.residency.refill` on a device.

Only the device knows which rows are absent, so a walk offers stretches of a sequence's rows, and
kernels take the absent ones. A stretch is offered only if all of it fits and a tenth of the slots
stays free, and only while no landing is under way.

A sequence whose walk has come around is looked at anew. Until that look is answered it does not
count as lacking rows, so its walk is forgotten, unless a landing is under way all that time. So
walks seldom rest here, and should not: the host's count of free slots is a lower bound, which may
grow though no row departs.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Final

from ess.door.device.memory.device_pools import DevicePools
from ess.door.device.residency.knowledge import Knowledge
from ess.door.device.residency.landings import Landings
from ess.door.residency.walks import Walk, Walks
from ess.door.sequences.sequence import Sequence
from ess.pool.device_bytes import LANDINGS

LOOK_PAGES: Final = 64


class DeviceRefill:
    def __init__(self, pools: DevicePools, landings: Landings, knowledge: Knowledge) -> None:
        self._pools = pools
        self._landings = landings
        self._knowledge = knowledge
        self._walks = Walks(LOOK_PAGES)

    def go_on(self, sequences: Many[Sequence]) -> int:
        """How many rows were offered, all of one sequence."""
        self._knowledge.all_resident(sequences)
        self._landings.go_on()
        if self._landings.is_busy:
            return 0
        lacking = self._knowledge.lacking(sequences)
        going = self._walks.next(lacking, self._evicted_count())
        return 0 if going is None else self._walk_on(*going)

    def _evicted_count(self) -> int:
        return int(self._pools.counting.heard().counts("evicted").sum())

    def _walk_on(self, sequence: Sequence, walk: Walk) -> int:
        rows, room = self._walks.rows(sequence, walk), self._knowledge.room()
        group_count, offered = self._pools.layout.group_count, 0
        last = min(walk.group + LANDINGS, group_count)
        for group in range(walk.group, last):
            if room[group] >= len(rows):
                stored = rows[self._pools.are_stored(group, rows)]
                self._landings.fill(sequence, group, stored)
                offered += len(stored)
        self._landings.go_on()
        if self._walks.turn(sequence, walk, last % group_count):
            self._knowledge.forget(sequence)
        return offered

    def forget_all(self) -> None:
        """Groups have other slots now: walks that rest start again."""
        self._walks.forget_all()

    def check(self) -> None:
        self._walks.check(self._pools.layout.group_count, self._evicted_count())
