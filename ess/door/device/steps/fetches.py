"""A step's copies of absent rows to the device, and how far compute has waited for them."""

from __future__ import annotations

from ess.door.device.memory.device_pools import DevicePools
from ess.door.device.steps.answers import DeviceFetch
from ess.door.device.steps.stopwatch import Stopwatch, TimedFetch
from ess.door.stats import Timings
from ess.flashtrans.mover import PreparedCopies
from ess.kernels.cuda.streams import CudaEvent
from ess.pool.device_bytes import RING
from ess.pool.lru.cuda import Residency
from ess.pool.lru.cuda_shape import Moment


class StepFetches:
    """A copy is all layers of a group; those of a step are numbered from 1. `count` have begun:
    the group's call claims slots, then the copy is queued. Compute has waited for the first
    `waited`."""

    def __init__(self, pools: DevicePools, timings: Timings, stopwatch: Stopwatch) -> None:
        self.count = self.waited = 0
        self._pools = pools
        self._timings, self._stopwatch = timings, stopwatch
        self._prepared: dict[tuple[int, int, int], list[PreparedCopies]] = {}
        self._events: dict[tuple[int, int], CudaEvent] = {}
        self._queued: list[DeviceFetch] = []

    def next_moment(self, *, part: int, first: int) -> Moment:
        """The moment of the next copy. Its claims overwrite those of the copy `RING` before it,
        which compute waits for first. The copy counts from here on, so that `hold_all` finds slots
        that were claimed and whose copy was never queued, because an error came between."""
        copy = self.count + 1
        if copy - RING > self.waited:
            self.hold(self._last_of(copy - RING))
        self.count = copy
        return Moment(copy=copy, waited=self.waited, part=part, first=first)

    def _last_of(self, copy: int) -> DeviceFetch:
        return next(fetch for fetch in self._queued if fetch.copy == copy and fetch.is_last)

    def queue(self, group: int, residency: Residency, moment: Moment) -> tuple[DeviceFetch, ...]:
        """Queues the copy of what the group's call of this moment has claimed."""
        lane, layers = self._pools.lane, self._pools.layout.groups[group]
        lane.follow(lane.steps)
        fetches = []
        for layer, copies in zip(layers, self._copies(group, residency, moment), strict=True):
            event, is_last = self._event(layer, moment.part), layer == layers[-1]
            timed = self._timed(layer, is_ahead=layer != layers[0])
            copies.queue(lane.steps.handle)
            if timed is not None:
                timed.queued()
            event.record(lane.steps.handle)  # last, so that it joins all that a capture has there
            fetches.append(DeviceFetch(self.hold, event, moment.copy, is_last, timed))
        self._queued += fetches
        return tuple(fetches)

    def _timed(self, layer: int, *, is_ahead: bool) -> TimedFetch | None:
        """A fetch that starts now, in a step that is timed."""
        watch, lane = self._stopwatch, self._pools.lane.steps.handle
        if not watch.is_on:
            return None
        return TimedFetch(watch, self._timings, layer, lane, is_ahead=is_ahead)

    def _copies(self, group: int, residency: Residency, moment: Moment) -> list[PreparedCopies]:
        """One for each layer; they name the same memory whenever this moment comes round."""
        key = group, moment.part, moment.copy % RING
        if key not in self._prepared:
            self._prepared[key] = [
                self._pools.lane.mover.prepare([copy])
                for copy in self._pools.copies(group, residency.claims(moment))
            ]
        return self._prepared[key]

    def _event(self, layer: int, part: int) -> CudaEvent:
        if (layer, part) not in self._events:
            self._events[layer, part] = CudaEvent(self._pools.lane.device)
        return self._events[layer, part]

    def hold(self, fetch: DeviceFetch) -> None:
        """Compute waits for a layer's copy, and so for all before it; the host does not."""
        if fetch.copy <= self.waited:
            return
        if fetch.timed is None:
            fetch.event.hold(self._pools.lane.compute)
        else:
            fetch.timed.hold(fetch.event, self._pools.lane.compute)
        self.waited = fetch.copy if fetch.is_last else max(self.waited, fetch.copy - 1)

    def hold_all(self) -> None:
        if self._queued:
            self.hold(self._queued[-1])
        assert self.waited == self.count, (
            f"{self.waited} of {self.count} copies were waited for: slots that are claimed have no "
            "rows, so this offload can only be closed"
        )

    def replayed(self, count: int) -> None:
        """A graph queues so many copies, and waits for them."""
        self.count = self.waited = count

    def end(self) -> None:
        """The step is sealed: the next one counts from 1 again."""
        self.count = self.waited = 0
        self._queued.clear()

    def check(self) -> None:
        assert self.waited <= self.count, f"{self.waited} of {self.count} copies were waited for"
