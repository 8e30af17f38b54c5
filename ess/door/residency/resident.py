"""Whether every row of a batch is in a slot, known for sure and almost for free.

A sequence that was looked up row by row and found resident stays so until some row leaves the pool
under pressure or with its page: new rows enter slots first, and a rejected draft was never part of
the length. So one number, the pool's `departed_count`, tells whether an earlier answer still holds.
(The MTP module's group is not looked at: its newest row may be missing.) Where layers attend to a
window, rows outside the window do not count; they leave as new rows come. Rows that leave there
have a count of their own, and when it changes the windows are looked up again. A sequence with
absent rows is not looked up again for `PATIENCE` steps: under pressure the answer stays no, and
asking costs a pass over all its rows. Rows in flight are another matter: they will be there soon,
so the next step asks again.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from ess.door.memory.pools import HostPools
from ess.door.sequences.sequence import Sequence

PATIENCE: Final = 16
SCARCE: Final = 10


@dataclass(frozen=True, slots=True)
class _Answer:
    """Resident while no row departs, or absent until a step; either while no row arrives."""

    arrival_count: int
    is_resident: bool
    departed_count: int
    window_departed_count: int
    until_step: int


@dataclass(slots=True)
class Resident:
    pools: HostPools
    _answers: dict[int, _Answer] = field(default_factory=dict)

    def lacking(self, sequences: Many[Sequence]) -> list[Sequence]:
        """The sequences with a row, in a main layer, that has not landed. Keeps the answers of the
        latest batch only."""
        answers = self._answers = {each.number: self._answer(each) for each in sequences}
        return [sequence for sequence in sequences if not answers[sequence.number].is_resident]

    def forget(self, sequence: Sequence) -> None:
        """The sequence is not known to be resident any more: its rows are looked up again."""
        self._answers.pop(sequence.number, None)

    def is_scarce(self) -> bool:
        """Less than a tenth of some group's slots is free: from here on, ages matter. This is False
        where layers attend to a window: there rows leave in the order in which they came."""
        groups = range(self.pools.layout.group_count)
        rooms = self.rooms()
        return any(rooms[g] < 0 for g in groups if not self.pools.layout.window_of(g))

    def rooms(self) -> npt.NDArray[np.int64]:
        """Free slots of each group above the last tenth."""
        slot_count, used_count = self.pools.sparse.counts()
        return slot_count - used_count + -slot_count // SCARCE

    def _answer(self, sequence: Sequence) -> _Answer:
        sparse, arrived = self.pools.sparse, sequence.progress.arrival_count
        if sequence.state != "active":
            return self._told(sequence, is_resident=False, until_step=sparse.step)
        known = self._answers.get(sequence.number)
        if known is not None and known.arrival_count == arrived:
            if known.is_resident:
                if known.departed_count == sparse.departed_count:
                    stands = known.window_departed_count == sparse.window_departed_count
                    return known if stands else self._look(sequence, self._window_groups())
            elif sparse.step < known.until_step:
                return known
        return self._look(sequence, self._groups())

    def _told(self, sequence: Sequence, *, is_resident: bool, until_step: int) -> _Answer:
        sparse = self.pools.sparse
        counts = sparse.departed_count, sparse.window_departed_count
        return _Answer(sequence.arrival_count, is_resident, *counts, until_step)

    def _look(self, sequence: Sequence, groups: Many[int]) -> _Answer:
        """Looks up the sequence row by row, as far as its next queries may read."""
        assert sequence.state == "active", f"{sequence!r} has no row on the device"
        sparse, first_read = self.pools.sparse, self.pools.layout.first_read
        sequence.progress.refresh()
        start = min((first_read(group, sequence.length) for group in groups), default=0)
        rows = sequence.holding.row_ids(start, sequence.length - start)
        read = {group: rows[first_read(group, sequence.length) - start :] for group in groups}
        is_absent = any((sparse.slot_of[group, rows] < 0).any() for group, rows in read.items())
        is_resident = not is_absent and all(
            (sparse.locate(group, rows) >= 0).all() for group, rows in read.items()
        )
        until_step = sparse.step + PATIENCE if is_absent else sparse.step
        return self._told(sequence, is_resident=is_resident, until_step=until_step)

    def _window_groups(self) -> list[int]:
        return [group for group in self._groups() if self.pools.layout.window_of(group)]

    def _groups(self) -> list[int]:
        """Groups of the main model, fewest rows first: those are the likeliest to lack a row."""
        layout, used_count = self.pools.layout, self.pools.sparse.used_count
        return sorted(range(layout.main_group_count), key=used_count)

    def check(self) -> None:
        """No answer may come from a future step, or hold for longer than `PATIENCE` steps;
        "resident" holds as long as no row departs."""
        for number, answer in self._answers.items():
            sparse = self.pools.sparse
            assert answer.departed_count <= sparse.departed_count, f"sequence {number}"
            assert answer.window_departed_count <= sparse.window_departed_count, answer
            assert answer.until_step <= self.pools.sparse.step + PATIENCE, f"sequence {number}"
            waits = answer.until_step > self.pools.sparse.step
            assert not (answer.is_resident and waits), f"sequence {number}: {answer}"
