"""How many slots each layer group has and uses, and how many rows have left their slots.

`departed_count` grows by each row that leaves under pressure or with its page, and by one for each
chunk that moves, even an empty one: residency and free slots as known at one count hold while the
count stands. Groups with a window count in `window_departed_count` instead: in the long run each of
their new rows takes the slot of a row behind the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ess.array_types import Counts
from ess.layout import ModelLayout


class SlotCounts:
    """`total` and `used` have an entry for each group."""

    def __init__(self, layout: ModelLayout, total: Counts) -> None:
        self._layout = layout
        self.total = total
        self.used = np.zeros(layout.group_count, np.int64)
        self.departed_count = 0
        self.window_departed_count = 0

    def took(self, groups: range, claimed: npt.NDArray[Any], evicted: Counts) -> None:
        """Counts slots of these groups that were claimed, and rows that gave way for them."""
        self.used[groups.start : groups.stop] += claimed - evicted
        if evicted.any():
            assert (evicted <= claimed).all(), f"groups {groups}: {evicted} gave way to {claimed}"
            for group, count in zip(groups, evicted.tolist(), strict=True):
                self._departed(group, count)

    def planned(self, group: int, claimed: int, evicted: int) -> None:
        """As `took`, for one group."""
        assert evicted <= claimed, "more rows gave way than slots were claimed"
        self.used[group] += claimed - evicted
        self._departed(group, evicted)

    def left(self, groups: Sequence[int], counts: Sequence[int], *, departed: bool) -> None:
        """Counts rows out of each group. They have `departed`, or were never part of a length."""
        for group, count in zip(groups, counts, strict=True):
            self.used[group] -= count
            assert self.used[group] >= 0, f"group {group} lost rows that it did not have"
            if departed:
                self._departed(group, count)

    def moved(self, total: Counts) -> None:
        """Counts a chunk that has moved: groups have this many slots now."""
        self.total = total
        self.departed_count += 1

    def _departed(self, group: int, count: int) -> None:
        assert count >= 0, f"group {group}: {-count} rows came by leaving"
        if self._layout.window_of(group):
            self.window_departed_count += count
        else:
            self.departed_count += count
