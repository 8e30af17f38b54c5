"""What the host knows for certain about a device's slots, from the counts that it has and the calls
that it has queued.

A look asks the device how many rows of a sequence have no slot; the answer comes behind a step. If
it was none, the sequence stays resident until a row gives way: new rows enter slots first. Rows
give way only where a call finds no free slot. So the host adds up what the calls queued since its
last counts may have claimed: a step whose sequences were all resident claims slots for its new rows
alone; any other call counts as the most that it could claim. The new rows of a step that has begun
count too. While the free slots suffice for that sum, no row has given way or will in that step, and
a sequence that was resident still is.

A sequence with absent rows is not looked at again for `PATIENCE` steps, as on the host. A look at
128K positions of 61 groups reads 8 million entries of maps. So few are under way at a time, and
none begins while some sequence is known to have absent rows, which decides for the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

import numpy as np
import torch

from ess.array_types import Counts
from ess.door.device.memory.counting import HeardCounts
from ess.door.device.memory.device_pools import DevicePools
from ess.door.device.residency.landings import Landings
from ess.door.residency.resident import PATIENCE, SCARCE
from ess.door.sequences.sequence import Sequence
from ess.units import div_ceil

LOOKS_MAX: Final = 4
LOOK_GROUPS: Final = 8
"""How many groups are looked at together."""


@dataclass(frozen=True, slots=True)
class _Look:
    """A question about one sequence: how many arrivals it had and how often its line had been left
    when it was asked, the sending that brings the answer, and the step until which a "no" holds."""

    arrival_count: int
    left_count: int
    sending: int
    until_step: int


class Knowledge:
    def __init__(self, pools: DevicePools, landings: Landings) -> None:
        self._pools = pools
        self._landings = landings
        self._looks: dict[int, _Look] = {}

    def all_resident(self, sequences: Many[Sequence]) -> bool:
        """Every row of the main model's layers is in a slot, for sure. The device is asked about
        sequences of which that is not known."""
        heard = self._pools.counting.heard()
        known = self._resident(sequences, heard)
        self._looks = {
            s.number: self._looks[s.number] for s in sequences if s.number in self._looks
        }
        self._ask([s for s in sequences if s.number not in known and s.state == "active"], heard)
        return len(known) == len(sequences)

    def _resident(self, sequences: Many[Sequence], heard: HeardCounts) -> frozenset[int]:
        """The numbers of those of these sequences that are known to be resident."""
        layout = self._pools.layout
        wanted = (0, int(heard.counts("evicted").sum()))
        known = frozenset(s.number for s in sequences if self._answer(s, heard) == wanted)
        free = self._free(heard)[: layout.main_group_count] - self._landings.new_rows
        for claims in heard.unheard:
            at_most = claims.at_most[: len(free)]
            if claims.new_rows is not None and claims.sequences <= known:
                at_most = np.minimum(at_most, claims.new_rows)
            free = free - at_most
        return known if (free >= 0).all() else frozenset()

    def _free(self, heard: HeardCounts) -> Counts:
        """Free slots by group, by the host's last counts."""
        sparse, layout = self._pools.sparse, self._pools.layout
        counts = [sparse.slot_count(group) for group in range(layout.group_count)]
        return np.array(counts, np.int64) - heard.used()

    def room(self) -> Counts:
        """Free slots by group above the last tenth, for sure."""
        heard = self._pools.counting.heard()
        sparse, free = self._pools.sparse, self._free(heard)
        for claims in heard.unheard:
            free = free - claims.at_most
        tenths = [div_ceil(sparse.slot_count(group), SCARCE) for group in range(len(free))]
        return free - np.array(tenths, np.int64)

    def lacking(self, sequences: Many[Sequence]) -> list[Sequence]:
        """The sequences whose latest look has been answered, and had an absent row."""
        heard = self._pools.counting.heard()
        return [s for s in sequences if (self._answer(s, heard) or (0, 0))[0] > 0]

    def _valid(self, sequence: Sequence) -> _Look | None:
        look = self._looks.get(sequence.number)
        if look is None or sequence.state != "active":
            return None
        left_count = self._pools.tables.left_count[sequence.line]
        same = (look.arrival_count, look.left_count) == (sequence.arrival_count, left_count)
        return look if same else None

    def _answer(self, sequence: Sequence, heard: HeardCounts) -> tuple[int, int] | None:
        """Absent rows, and rows that had given way by then; None while it is not known."""
        look = self._valid(sequence)
        if look is None:
            return None
        return heard.look(sequence.line, look.sending)

    def _ask(self, sequences: Many[Sequence], heard: HeardCounts) -> None:
        """Looks at sequences of which nothing is known; those come first that were never looked at,
        then those whose answer is oldest."""
        room, step, unknown = LOOKS_MAX, self._pools.sparse.step, list[tuple[int, Sequence]]()
        for sequence in sequences:
            sequence.progress.refresh()
            look, answer = self._valid(sequence), self._answer(sequence, heard)
            if look is None or (answer is not None and answer[0] == 0):
                unknown.append((0 if look is None else look.until_step, sequence))
            elif answer is None:
                room -= 1
            elif step < look.until_step:
                return
            else:
                unknown.append((look.until_step, sequence))
        for _, sequence in sorted(unknown, key=itemgetter(0))[: max(0, room)]:
            self._look(sequence)
            self._looks[sequence.number] = _Look(
                sequence.arrival_count,
                self._pools.tables.left_count[sequence.line],
                self._pools.counting.next_sending,
                step + PATIENCE,
            )

    def _look(self, sequence: Sequence) -> None:
        """Counts the sequence's rows that have no slot, or whose copy may not have landed."""
        pools = self._pools
        pools.tables.maps.flush()
        sparse, maps = pools.sparse, pools.tables.maps
        rows = maps.rows_of_line(sequence.line, sequence.page_count)
        counted = maps.places_of_line(sequence.page_count) < maps.lengths[sequence.line]
        absent = pools.counting.looks.new_zeros(())
        behind = self._landings.behind()
        main = sparse.slot_of[: pools.layout.main_group_count]
        for slot_of in torch.split(main, LOOK_GROUPS):
            slots = slot_of.index_select(1, rows)
            tickets = sparse.ticket_of.take(slots.clamp(min=0).long())
            waits = (tickets % 2 == 1) & (tickets > behind)
            absent = absent + (((slots < 0) | waits) & counted).sum()
        pools.counting.looks[sequence.line, 0] = absent
        pools.counting.looks[sequence.line, 1] = pools.counting.evicted()

    def forget(self, sequence: Sequence) -> None:
        self._looks.pop(sequence.number, None)

    def forget_all(self) -> None:
        """Forgets all answers: rows have left that no call of a step has evicted."""
        self._looks.clear()

    def check(self) -> None:
        for number, look in self._looks.items():
            assert look.until_step <= self._pools.sparse.step + PATIENCE, f"sequence {number}"
            assert look.sending <= self._pools.counting.next_sending, f"sequence {number}"
