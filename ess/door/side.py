"""What an `Offload` asks of its slots: the host's are here, a device's in `ess.door.device`."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ess.clock import Clock
from ess.door.memory.pools import HostPools, Pools
from ess.door.residency.budgets import Budgets
from ess.door.residency.refill import Refill
from ess.door.residency.resident import Resident
from ess.door.residency.row_copies import differing_slots
from ess.door.residency.slots import Slots
from ess.door.sequences.sequence import Sequence
from ess.door.stats import Counters, Stats, Timings
from ess.door.steps.placement import Placement
from ess.kernels.streams import Lane
from ess.overlap.timeline import Stopwatch

MakePlacement: TypeAlias = Callable[[Slots], Placement]


class Differing(Protocol):
    """Slots that differ from their rows on the host, read when a caller asks."""

    def read(self) -> DifferingSlots: ...


@dataclass(frozen=True, slots=True)
class DifferingSlots:
    """How many slots differ, and the (slot, row id) of those that are listed."""

    count: int
    listed: list[tuple[int, int]]

    def read(self) -> DifferingSlots:
        return self


class Side(Protocol):
    """The slots of an offload, and the host's knowledge of them."""

    @property
    def pools(self) -> Pools: ...

    @property
    def placement(self) -> Placement: ...

    @property
    def timings(self) -> Timings: ...

    @property
    def stopwatch(self) -> Stopwatch | None:
        """The clock of a device, whose work the host's clock does not see."""

    def step_begun(self) -> None: ...

    def stats(self) -> Stats: ...

    def all_resident(self, sequences: Many[Sequence]) -> bool: ...

    def is_scarce(self) -> bool: ...

    def refill(self, sequences: Many[Sequence]) -> int: ...

    def rebalance(self) -> int: ...

    def compare(self, layer: int, *, most: int) -> Differing:
        """Compares clean slots with their rows on the host; lists at most `most` of those that
        differ."""

    def drain(self) -> None:
        """Waits until every copy under way has landed."""

    def check(self) -> None: ...

    def close(self) -> None:
        """Stops what moves rows; every copy has landed before."""


class HostSide:
    """Slots in memory of the host."""

    def __init__(
        self, pools: HostPools, lane: Lane, clock: Clock, make_placement: MakePlacement | None
    ) -> None:
        self.pools = pools
        self.stopwatch: Stopwatch | None = None
        self.timings = Timings(layout=pools.layout, clock=clock)
        self.counters = Counters(pools.layout)
        self.resident = Resident(pools)
        self.keeper = Refill(pools, self.resident)
        self.budgets = Budgets(pools)
        self.slots = Slots(pools, self.counters, self.timings)
        self.placement = self.slots if make_placement is None else make_placement(self.slots)
        self._lane = lane

    def step_begun(self) -> None:
        self.counters.step_count += 1

    def stats(self) -> Stats:
        return self.counters.read(self.pools, self.timings)

    def all_resident(self, sequences: Many[Sequence]) -> bool:
        return not self.resident.lacking(sequences)

    def is_scarce(self) -> bool:
        return self.resident.is_scarce()

    def refill(self, sequences: Many[Sequence]) -> int:
        plans = self.keeper.go_on(sequences)
        for plan in plans:
            self.counters.moved(plan)
        return sum(len(plan.rows) for plan in plans)

    def rebalance(self) -> int:
        return self.budgets.rebalance(self.counters.misses())

    def compare(self, layer: int, *, most: int) -> DifferingSlots:
        slots, rows = differing_slots(self.pools, layer)
        listed = zip(slots[:most].tolist(), rows[:most].tolist(), strict=True)
        return DifferingSlots(len(slots), list(listed))

    def drain(self) -> None:
        self.pools.inflight.drain()

    def check(self) -> None:
        for part in (self.slots, self.resident, self.keeper, self.budgets):
            part.check()

    def close(self) -> None:
        self._lane.close()
