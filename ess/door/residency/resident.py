"""Whether every row of a batch is in a slot, known for sure and almost for free.

A sequence that was looked up row by row and found resident stays so until some row leaves the pool
under pressure or with its page: new rows enter slots first, and a rejected draft was never part of
the length. So one number, the pool's `departed_count`, tells whether an earlier answer still holds.
(Not so in the MTP module, whose row may lag or lack: its group is not looked at.)
A sequence with absent rows is not looked up again for `PATIENCE` steps: under pressure the answer
stays no, and asking costs a pass over all its rows. Rows in flight are another matter: they will be
there soon, so the next step asks again.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Final

from ess.door.pools import HostPools
from ess.door.sequences.sequence import Sequence
from ess.units import div_ceil

PATIENCE: Final = 16
SCARCE: Final = 10


@dataclass(frozen=True, slots=True)
class _Answer:
    """Resident while no row departs, or absent until a step; either while no row arrives."""

    arrival_count: int
    is_resident: bool
    departed_count: int
    until_step: int


@dataclass(slots=True)
class Resident:
    pools: HostPools
    _answers: dict[int, _Answer] = field(default_factory=dict)

    def lacking(self, sequences: Many[Sequence]) -> list[Sequence]:
        """Those with a row of the main model's layers that has not landed. Remembers the latest
        batch only."""
        answers = self._answers = {each.number: self._answer(each) for each in sequences}
        return [sequence for sequence in sequences if not answers[sequence.number].is_resident]

    def forget(self, sequence: Sequence) -> None:
        """Its rows are to be looked up again."""
        self._answers.pop(sequence.number, None)

    def is_scarce(self) -> bool:
        """Less than a tenth of some group's slots is free: from here on, ages matter."""
        return any(self.room(group) < 0 for group in range(self.pools.layout.group_count))

    def room(self, group: int) -> int:
        """Free slots above the last tenth."""
        sparse = self.pools.sparse
        slot_count, used_count = sparse.slot_count(group), sparse.used_count(group)
        assert 0 <= used_count <= slot_count, f"group {group}: {used_count} of {slot_count} used"
        return slot_count - used_count - div_ceil(slot_count, SCARCE)

    def _answer(self, sequence: Sequence) -> _Answer:
        sparse, arrived = self.pools.sparse, sequence.arrival_count
        if sequence.state != "active":
            return _Answer(arrived, False, sparse.departed_count, sparse.step)
        known = self._answers.get(sequence.number)
        if known is not None and known.arrival_count == arrived:
            if known.is_resident:
                if known.departed_count == sparse.departed_count:
                    return known
            elif sparse.step < known.until_step:
                return known
        return self._look(sequence)

    def _look(self, sequence: Sequence) -> _Answer:
        """Row by row."""
        assert sequence.state == "active", f"{sequence!r} has no row on the device"
        sparse, groups = self.pools.sparse, self._groups()
        sequence.progress.refresh()
        rows = sequence.holding.row_ids(0, sequence.length)
        is_absent = any((sparse.slot_of[group, rows] < 0).any() for group in groups)
        is_resident = not is_absent and all(
            (sparse.locate(group, rows) >= 0).all() for group in groups
        )
        until_step = sparse.step + PATIENCE if is_absent else sparse.step
        departed_count = sparse.departed_count
        return _Answer(sequence.arrival_count, is_resident, departed_count, until_step)

    def _groups(self) -> list[int]:
        """Of the main model, fewest rows first: the likeliest to lack a row."""
        layout, used_count = self.pools.layout, self.pools.sparse.used_count
        return sorted(range(layout.main_group_count), key=used_count)

    def check(self) -> None:
        """No answer is of a time to come, or good for longer than `PATIENCE` steps; "resident"
        holds as long as no row departs, not for a number of steps."""
        for number, answer in self._answers.items():
            assert answer.departed_count <= self.pools.sparse.departed_count, f"sequence {number}"
            assert answer.until_step <= self.pools.sparse.step + PATIENCE, f"sequence {number}"
            waits = answer.until_step > self.pools.sparse.step
            assert not (answer.is_resident and waits), f"sequence {number}: {answer}"
