"""What the offload did, per layer group and per layer, since it was made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ess.door.pools import Pools
from ess.door.timings import Timings
from ess.layout import ModelLayout
from ess.pool.lru.arena import FetchPlan

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counts per layer group; bytes over all layers of the group.

    Times and counts of fetches are per layer: `transfer_ns` on the lane, of which `exposed_ns` was
    waited for and `hidden_ns` was not; `ahead_count` fetches had started before their layer asked.
    """

    hit_count: Counts
    miss_count: Counts
    place_count: Counts
    evicted_count: Counts
    fetched_bytes: Counts
    stored_bytes: Counts
    used_slot_count: Counts
    slot_count: Counts
    transfer_ns: Counts
    exposed_ns: Counts
    hidden_ns: Counts
    fetch_count: Counts
    ahead_count: Counts
    step_count: int
    host_page_count: int
    free_host_page_count: int
    index_page_count: int
    free_index_page_count: int

    @property
    def hit_ratio(self) -> float:
        """Share of selected entries that were resident, over all groups."""
        asked = int(self.hit_count.sum() + self.miss_count.sum() + self.place_count.sum())
        return float(self.hit_count.sum()) / asked if asked else 1.0


class Counters:
    """The running counts; `Stats` is a copy of them."""

    def __init__(self, layout: ModelLayout) -> None:
        self._row_bytes = [len(layers) * layout.row_bytes for layers in layout.groups]
        self._counts = {
            name: np.zeros(layout.group_count, np.int64)
            for name in (
                "hit_count",
                "miss_count",
                "place_count",
                "evicted_count",
                "fetched_bytes",
                "stored_bytes",
            )
        }
        self.step_count = 0

    def planned(self, plan: FetchPlan) -> None:
        self._counts["hit_count"][plan.group] += plan.hit_count
        self._counts["miss_count"][plan.group] += len(plan.rows)
        self._counts["place_count"][plan.group] += plan.place_count
        self.moved(plan)

    def located(self, group: int, selection: npt.NDArray[np.int32]) -> None:
        """All of it was resident. At full length no row has padding, and none is looked through."""
        padded = selection[selection[:, -1] < 0]
        full_count = (len(selection) - len(padded)) * selection.shape[1]
        self._counts["hit_count"][group] += full_count + np.count_nonzero(padded >= 0)

    def moved(self, plan: FetchPlan) -> None:
        self._counts["evicted_count"][plan.group] += plan.evicted_count
        self._counts["fetched_bytes"][plan.group] += len(plan.rows) * self._row_bytes[plan.group]

    def stored(self, bytes_of: Mapping[int, int]) -> None:
        """By group."""
        for group, byte_count in bytes_of.items():
            self._counts["stored_bytes"][group] += byte_count

    def misses(self) -> Counts:
        return self._counts["miss_count"] + self._counts["place_count"]

    def read(self, pools: Pools, timings: Timings) -> Stats:
        groups = range(pools.layout.group_count)
        return Stats(
            **{name: counts.copy() for name, counts in self._counts.items()},
            **{name: counts.copy() for name, counts in timings.counts.items()},
            used_slot_count=np.array([pools.sparse.used_count(g) for g in groups], np.int64),
            slot_count=np.array([pools.sparse.slot_count(g) for g in groups], np.int64),
            step_count=self.step_count,
            host_page_count=pools.latent.pages.page_count,
            free_host_page_count=pools.latent.free_count,
            index_page_count=pools.index.pages.page_count,
            free_index_page_count=pools.index.pages.free_count,
        )
