"""Walks through sequences with absent rows, on the host and on a device: where each goes on.

A walk that came around rests until a row has departed since it began, slots have changed their
group or rows have arrived from elsewhere. (Slots of rejected drafts are for the next drafts.)
Without that, a sequence that a small group can never hold would be looked through in every step.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from ess.array_types import RowIds
from ess.door.sequences.sequence import Sequence
from ess.units import PAGE_ROWS


@dataclass(slots=True)
class Walk:
    """Goes on at `page` and `group`. It began, and rests, at a count of departed rows; new arrivals
    end it."""

    arrival_count: int
    page: int = 0
    group: int = 0
    began_at: int = -1
    rests_at: int = -1


class Walks:
    """Each look is at `look_pages` pages in some groups."""

    def __init__(self, look_pages: int) -> None:
        self._look_pages = look_pages
        self._walks: dict[int, Walk] = {}

    def next(self, lacking: Many[Sequence], departed_count: int) -> tuple[Sequence, Walk] | None:
        """The first of these sequences whose walk does not rest, and that walk. Walks through other
        sequences are forgotten."""
        self._walks = {each.number: self._walk(each) for each in lacking}
        for sequence in lacking:
            walk = self._walks[sequence.number]
            if walk.rests_at != departed_count:
                if walk.page == walk.group == 0:
                    walk.began_at = departed_count
                return sequence, walk
        return None

    def _walk(self, sequence: Sequence) -> Walk:
        walk = self._walks.get(sequence.number)
        if walk is None or walk.arrival_count != sequence.arrival_count:
            return Walk(sequence.arrival_count)
        return walk

    def rows(self, sequence: Sequence, walk: Walk) -> RowIds:
        """The row ids that the walk looks at next."""
        start = walk.page * PAGE_ROWS
        count = min(self._look_pages * PAGE_ROWS, sequence.length - start)
        assert count > 0, f"a walk at {start} of {sequence.length} positions"
        return sequence.holding.row_ids(start, count)

    def turn(self, sequence: Sequence, walk: Walk, group: int) -> bool:
        """Moves the walk on: to a later group, to further pages, or back to the first; whether it
        came around."""
        assert walk.began_at >= 0, f"{walk} goes on and never began"
        assert group == 0 or group > walk.group, f"{walk} goes back to {group}"
        walk.group = group
        if group:
            return False
        walk.page += self._look_pages
        came_around = walk.page * PAGE_ROWS >= sequence.length
        if came_around:
            walk.page, walk.rests_at = 0, walk.began_at
        return came_around

    def forget_all(self) -> None:
        """Groups have other slots now: walks that rest start again."""
        self._walks.clear()

    def check(self, group_count: int, departed_count: int) -> None:
        for number, walk in self._walks.items():
            assert walk.page % self._look_pages == 0, f"sequence {number}: {walk}"
            assert 0 <= walk.group < group_count, f"sequence {number}: {walk}"
            assert walk.rests_at <= departed_count, f"sequence {number}: {walk}"
