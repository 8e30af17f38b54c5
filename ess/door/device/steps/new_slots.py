"""Slots for the new rows of a step, claimed when a group's first call needs them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ess.door.device.memory.device_pools import DevicePools
from ess.pool.lru.cuda_new_rows import NewRows


class NewSlots:
    """`slots` [group, query] are those of the step's new rows, `claimed` the groups that have
    them, `calls` the groups of each call that claimed."""

    def __init__(self, pools: DevicePools, now: Tensor) -> None:
        self.claimed: set[int] = set()
        self.calls: list[range] = []
        self._pools = pools
        self._kernel = NewRows(
            pools.lane.device,
            pools.sparse.arenas,
            pools.queries.new_rows,
            now,
            ints=pools.ints,
            block_max=pools.sparse.block_max,
        )
        self.reports = self._kernel.reports
        self.slots: Tensor = self._kernel.slots.view(pools.layout.group_count, -1)

    def of(self, group: int, queries: range) -> Tensor:
        self.claim(group)
        return self.slots[group, queries.start : queries.stop]

    def claim(self, group: int) -> None:
        """Claims slots for this group, if it has none yet; all groups of the main model are claimed
        together."""
        if group not in self.claimed:
            main = range(self._pools.layout.main_group_count)
            groups = main if group in main else range(group, group + 1)
            self._kernel.claim(groups, stream=self._pools.lane.compute)
            self._note([groups])

    def replayed(self, calls: Iterable[range]) -> None:
        """A graph makes these calls."""
        self._note(calls)

    def _note(self, calls: Iterable[range]) -> None:
        for groups in calls:
            self.calls.append(groups)
            self.claimed.update(groups)

    def end(self) -> None:
        self.claimed.clear()
        self.calls.clear()
