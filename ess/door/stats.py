"""The offload's counts since it was made, per layer group and per layer.

A layer's fetch is on the lane from `started_ns` to `finished_ns` of its event: its transfer time.
What the owner's thread spent waiting for that event is exposed, the rest of the transfer is hidden.
A wait may also sit out what the lane had before (a store, another layer's fetch): the time is lost
to the layer all the same, so exposed may exceed transfer, and hidden never goes below zero. A copy
made at submission hides nothing, though no call ever waits for it.

Followers of a group are fetched with their leader. `ahead_count` says how many of a layer's fetches
had started before the layer itself asked for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ess.array_types import Counts
from ess.clock import Clock
from ess.door.memory.pools import HostPools, Pools
from ess.flashtrans.lanes import DoneEvent
from ess.kernels.streams import Event
from ess.layout import ModelLayout
from ess.pool.disk.use import DiskUse
from ess.pool.lru.arena import FetchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counts per layer group; bytes over all layers of the group.

    Times and counts of fetches are per layer: `transfer_ns` on the lane, of which `exposed_ns` was
    waited for and `hidden_ns` was not; `ahead_count` fetches had started before their layer asked.
    These fetches have moved `moved_bytes`, per group. On a device some steps are timed, on the host
    all of them.
    """

    hit_count: Counts
    miss_count: Counts
    place_count: Counts
    evicted_count: Counts
    fetched_bytes: Counts
    stored_bytes: Counts
    moved_bytes: Counts
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
    disk: DiskUse | None

    @property
    def hit_ratio(self) -> float:
        """Share of selected entries that were resident, over all groups."""
        asked = int(self.hit_count.sum() + self.miss_count.sum() + self.place_count.sum())
        return float(self.hit_count.sum()) / asked if asked else 1.0


def pool_counts(pools: Pools) -> dict[str, Any]:
    """The sizes of the pools, and what is free in them now, as fields of `Stats`."""
    groups, pages = range(pools.layout.group_count), pools.index.pages
    return {
        "slot_count": np.array([pools.sparse.slot_count(g) for g in groups], np.int64),
        "host_page_count": pools.latent.pages.page_count,
        "free_host_page_count": pools.latent.free_count,
        "index_page_count": pages.page_count,
        "free_index_page_count": pages.free_count,
        "disk": None if pools.shelf is None else pools.shelf.uses,
    }


class Counters:
    """The running counts; `Stats` is a copy of them."""

    def __init__(self, layout: ModelLayout) -> None:
        self._row_bytes: Counts = np.array(
            [
                len(layers) * layout.group_row(group).row_bytes
                for group, layers in enumerate(layout.groups)
            ]
        )
        counts = ("hit_count", "miss_count", "place_count", "evicted_count")
        names = (*counts, "fetched_bytes", "stored_bytes", "moved_bytes")
        self._counts = {name: np.zeros(layout.group_count, np.int64) for name in names}
        self.step_count = 0

    def planned(self, plan: FetchPlan) -> None:
        self._counts["hit_count"][plan.group] += plan.hit_count
        self._counts["miss_count"][plan.group] += len(plan.rows)
        self._counts["place_count"][plan.group] += plan.place_count
        self._counts["moved_bytes"][plan.group] += len(plan.rows) * self._row_bytes[plan.group]
        self.moved(plan)

    def found(self, groups: slice, hits: Counts) -> None:
        """Adds hits that were resident in neighbouring groups."""
        self._counts["hit_count"][groups] += hits

    def took(self, groups: slice, misses: Counts, evicted: Counts) -> None:
        """Neighbouring groups had all that they missed copied at once."""
        moved = misses * self._row_bytes[groups]
        self._counts["miss_count"][groups] += misses
        self._counts["evicted_count"][groups] += evicted
        for name in ("moved_bytes", "fetched_bytes"):
            self._counts[name][groups] += moved

    def located(self, group: int, selection: npt.NDArray[np.int32]) -> None:
        """All of it was resident. At full length no row has padding, and none is looked through."""
        padded = selection[selection[:, -1] < 0]
        full_count = (len(selection) - len(padded)) * selection.shape[1]
        self._counts["hit_count"][group] += full_count + np.count_nonzero(padded >= 0)

    def moved(self, plan: FetchPlan) -> None:
        self._counts["evicted_count"][plan.group] += plan.evicted_count
        self._counts["fetched_bytes"][plan.group] += len(plan.rows) * self._row_bytes[plan.group]

    def stored(self, groups: Sequence[int], row_count: int) -> None:
        """Counts `row_count` stored rows for each layer of these groups."""
        if not groups or not row_count:
            return
        mine: Any = list(groups)
        if len(groups) == groups[-1] - groups[0] + 1:
            mine = slice(groups[0], groups[-1] + 1)
        self._counts["stored_bytes"][mine] += row_count * self._row_bytes[mine]

    def misses(self) -> Counts:
        return self._counts["miss_count"] + self._counts["place_count"]

    def read(self, pools: HostPools, timings: Timings) -> Stats:
        groups = range(pools.layout.group_count)
        counted: dict[str, Any] = {**self._counts, **timings.counts}
        return Stats(
            **{name: counts.copy() for name, counts in counted.items()},
            used_slot_count=np.array([pools.sparse.used_count(g) for g in groups], np.int64),
            step_count=self.step_count,
            **pool_counts(pools),
        )


@dataclass(slots=True, kw_only=True)
class TimedFetch:
    """One layer's fetch of a part: when the layer asked for it, how long it has waited."""

    layer: int
    event: Event
    settle: Callable[[Event], None]
    clock: Clock
    asked_ns: int | None = None
    waited_ns: int = 0

    def ask(self) -> None:
        if self.asked_ns is None:
            self.asked_ns = self.clock.now_ns()

    def wait(self) -> None:
        started_ns = self.clock.now_ns()
        self.settle(self.event)
        self.waited_ns += self.clock.now_ns() - started_ns

    @property
    def is_done(self) -> bool:
        return self.event.done()


@dataclass(slots=True, kw_only=True)
class Timings:
    """Sums per layer since the start, and the fetches of the open step.

    If `keeps_spans`, also each fetch as (layer, started_ns, finished_ns), until the reader clears
    them.
    """

    layout: ModelLayout
    clock: Clock
    counts: dict[str, Counts] = field(init=False)
    keeps_spans: bool = False
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    _fetches: list[TimedFetch] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = ("transfer_ns", "exposed_ns", "hidden_ns", "fetch_count", "ahead_count")
        self.counts = {name: np.zeros(self.layout.layer_total, np.int64) for name in names}

    def fetch(self, layer: int, event: Event, settle: Callable[[Event], None]) -> TimedFetch:
        """A layer's fetch is under way; `settle` waits for it."""
        timed = TimedFetch(layer=layer, event=event, settle=settle, clock=self.clock)
        self._fetches.append(timed)
        return timed

    def copied(self, layers: Sequence[int], times: Sequence[tuple[int, int]]) -> None:
        """All layers of a group were copied while the caller waited."""
        for layer, (started_ns, finished_ns) in zip(layers, times, strict=True):
            self.count(layer, started_ns, finished_ns, None, is_ahead=layer != layers[0])

    def took(self, layers: range, times: Counts) -> None:
        """Each of these neighbours, alone in its group, was copied between these [start, end) while
        the caller waited, or not at all."""
        mine, taken_ns = slice(layers.start, layers.stop), times[:, 1] - times[:, 0]
        for name in ("transfer_ns", "exposed_ns"):
            self.counts[name][mine] += taken_ns
        self.counts["fetch_count"][mine] += taken_ns > 0
        if self.keeps_spans:
            self.spans += [
                (layer, started_ns, finished_ns)
                for layer, (started_ns, finished_ns) in zip(layers, times.tolist(), strict=True)
                if finished_ns > started_ns
            ]

    def landed(self) -> None:
        """The step is over, and so are its fetches."""
        for fetch in self._fetches:
            event = fetch.event
            if fetch.asked_ns is not None and event.done():
                is_ahead = event.started_ns < fetch.asked_ns
                waited_ns = None if isinstance(event, DoneEvent) else fetch.waited_ns
                self.count(
                    fetch.layer, event.started_ns, event.finished_ns, waited_ns, is_ahead=is_ahead
                )
        self._fetches.clear()

    def count(
        self,
        layer: int,
        started_ns: int,
        finished_ns: int,
        waited_ns: int | None,
        *,
        is_ahead: bool,
    ) -> None:
        """`waited_ns` None: the copy was made while the caller waited."""
        transfer_ns = finished_ns - started_ns
        assert transfer_ns >= 0, f"a fetch of layer {layer} ended before it started"
        if self.keeps_spans:
            self.spans.append((layer, started_ns, finished_ns))
        exposed_ns = transfer_ns if waited_ns is None else waited_ns
        counts = self.counts
        counts["transfer_ns"][layer] += transfer_ns
        counts["exposed_ns"][layer] += exposed_ns
        counts["hidden_ns"][layer] += max(0, transfer_ns - exposed_ns)
        counts["fetch_count"][layer] += 1
        counts["ahead_count"][layer] += is_ahead
