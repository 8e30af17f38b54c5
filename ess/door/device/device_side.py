"""The slots of an offload on a CUDA device, and the host's knowledge of them."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import numpy as np

from ess.clock import Clock
from ess.door.device.memory.device_pools import DevicePools, build_device_pools
from ess.door.device.memory.lane import DeviceLane
from ess.door.device.residency.comparing import DeviceDiffering, compare
from ess.door.device.residency.knowledge import Knowledge
from ess.door.device.residency.landings import Landings
from ess.door.device.residency.leaving import Leaving
from ess.door.device.residency.refilling import DeviceRefill
from ess.door.device.steps.device_slots import DeviceSlots
from ess.door.device.steps.stopwatch import Stopwatch
from ess.door.memory.pools import PoolSizes
from ess.door.residency.budgets import Budgets
from ess.door.sequences.sequence import Sequence
from ess.door.stats import Stats, Timings, pool_counts
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.pool.disk.elsewhere import Elsewhere
from ess.pool.disk.tier import DiskTier


class DeviceSide:
    def __init__(self, pools: DevicePools, clock: Clock) -> None:
        self.pools = pools
        self.timings = Timings(layout=pools.layout, clock=clock)
        self.landings = Landings(pools)
        self.knowledge = Knowledge(pools, self.landings)
        self.keeper = DeviceRefill(pools, self.landings, self.knowledge)
        self.stopwatch = Stopwatch(pools.lane, self.timings, clock)
        self.slots = DeviceSlots(pools, self.landings, self.knowledge, self.timings, self.stopwatch)
        self.placement = self.slots
        self.step_count = 0
        self.budgets = Budgets(pools)
        pools.sparse.leaving = Leaving(pools, self.landings)

    def step_begun(self) -> None:
        self.step_count += 1

    def stats(self) -> Stats:
        """The counts of the latest step whose results the host has."""
        pools, heard = self.pools, self.pools.counting.heard()
        row_bytes = np.array([len(g) for g in pools.layout.groups]) * pools.layout.row_bytes
        times: dict[str, Any] = {name: n.copy() for name, n in self.timings.counts.items()}
        return Stats(
            hit_count=heard.counts("hits", "select"),
            miss_count=heard.counts("claimed", "select"),
            place_count=heard.counts("places", "select"),
            evicted_count=heard.counts("evicted", "select", "landing"),
            fetched_bytes=heard.counts("claimed", "select", "landing") * row_bytes,
            stored_bytes=heard.counts("stored") * row_bytes,
            moved_bytes=self.stopwatch.moved_rows * row_bytes,
            **times,
            used_slot_count=heard.used(),
            step_count=self.step_count,
            **pool_counts(pools),
        )

    def all_resident(self, sequences: Many[Sequence]) -> bool:
        """True only if that is certain. If the host does not know, it asks the device, which
        answers after a step."""
        return self.knowledge.all_resident(sequences)

    def is_scarce(self) -> bool:
        """Always False: where slots are short, `locate_all` stamps what it finds by itself."""
        return False

    def refill(self, sequences: Many[Sequence]) -> int:
        """How many rows are offered; the device knows which of them are absent, and fetches only
        those."""
        return self.keeper.go_on(sequences)

    def rebalance(self) -> int:
        """Waits for queued work. While landings are under way nothing moves, because they claim
        slots."""
        pools, counting = self.pools, self.pools.counting
        if self.landings.is_busy:
            return 0
        self.slots.settle()
        pools.lane.mark().wait()
        counting.wait()
        pools.sparse.look()
        heard = counting.heard()
        misses = heard.counts("claimed", "select") + heard.counts("places", "select")
        moved = self.budgets.rebalance(misses)
        if moved:
            counting.wait()
            self.knowledge.forget_all()
            self.keeper.forget_all()
        return moved

    def compare(self, layer: int, *, most: int) -> DeviceDiffering:
        return compare(self.pools, layer, most=most)

    def drain(self) -> None:
        self.landings.drain()
        self.slots.settle()
        self.pools.inflight.drain()
        self.pools.lane.mark().wait()
        self.pools.counting.wait()

    def check(self) -> None:
        self.drain()
        for part in (self.slots, self.landings, self.knowledge, self.keeper, self.budgets):
            part.check()
        self._check_used()

    def _check_used(self) -> None:
        used, pools = self.pools.counting.heard().used(), self.pools
        for group in range(pools.layout.group_count):
            own_count = pools.sparse.used_count(group)
            assert used[group] == own_count, (
                f"group {group} counts {used[group]} slots, has {own_count}"
            )

    def close(self) -> None:
        self.landings.drain()
        self.pools.lane.close()


def open_device_side(
    layout: ModelLayout,
    sizes: PoolSizes,
    device: str,
    clock: Clock,
    disk: DiskTier | Elsewhere | None,
) -> DeviceSide:
    """`device` is "cuda" or "cuda:0"."""
    kind, _, ordinal = device.partition(":")
    if kind != "cuda" or not (ordinal or "0").isdigit():
        raise BadInput(f"device is {device!r}, must be 'cpu', 'cuda' or 'cuda:<number>'")
    lane = DeviceLane(int(ordinal or 0))
    return DeviceSide(build_device_pools(layout, sizes, lane, disk), clock)
