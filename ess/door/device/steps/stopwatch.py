"""Times of some steps on a device: events in pairs, read when they have passed, never waited for.

Every `TIMED_EVERY`-th step is timed; not the first ones, in which kernels load. The engine may skip
a turn, or time a step out of turn. A timed step's fetches, and its stages where the engine has any,
leave notes: pairs of events, and what their times are reported as. The step's last event is
recorded at its seal. When a later step begins the host asks whether that event has passed; then all
others have too. No step is timed until then, so an event is never recorded again before it was
read.

A captured graph records its events again in every replay, so each graph has events and notes of its
own. They must be external events: others only order captured work and have no time. The graph of a
step that is not timed has no events; the engine keeps both graphs (`Course.is_timed`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from ess.array_types import Counts
from ess.clock import Clock
from ess.door.device.memory.lane import DeviceLane
from ess.door.stats import Timings
from ess.kernels.cuda.streams import CudaEvent
from ess.overlap.timeline import At, Note

TIMED_EVERY: Final = 16
FIRST_TIMED: Final = 2


class Stopwatch:
    """`moved_rows` were claimed by the fetches of each group whose times have been told. `is_on`
    from the beginning of a timed step to its seal."""

    def __init__(self, lane: DeviceLane, timings: Timings, clock: Clock) -> None:
        self.is_on = False
        self.rests = False
        groups = timings.layout.group_count
        self.moved_rows: Counts = np.zeros(groups, np.int64)
        self._claimed = torch.zeros(groups, dtype=torch.int64, pin_memory=True)
        self._lane = lane
        self._timings = timings
        self._clock = clock
        self._began = CudaEvent(lane.device)
        self._ended = CudaEvent(lane.device)
        self._began_ns = 0
        self._events: list[CudaEvent] = []
        self._used_count = 0
        self._notes: list[Note] = []
        self._is_pending = False
        self._tells = True
        self._step_count = 0

    def begin(self) -> None:
        """A step begins; a trace that is on wants to see it whichever it is."""
        self.read()
        is_turn = self._step_count % TIMED_EVERY == FIRST_TIMED
        wanted = not self.rests and (is_turn or self._timings.keeps_spans)
        self._step_count += not self.rests
        self.is_on = wanted and not self._is_pending
        if self.is_on:
            self._start()

    def start(self) -> bool:
        """Whether the step that has begun is timed: also out of turn, if none is still unread."""
        if not self.is_on and not self._is_pending:
            self.is_on = True
            self._start()
        return self.is_on

    def _start(self) -> None:
        self._notes, self._used_count = [], 0
        self._tells = not self.rests
        self._began_ns = self._clock.now_ns()
        self._began.record(self._lane.compute)

    def skip(self) -> None:
        """The step that has begun is not timed after all; nothing of it is queued."""
        assert not self._notes, "a step that is queued stays timed"
        self.is_on = False

    def mark(self, stream: int | None = None) -> CudaEvent:
        """A moment of compute, or of another stream that does work of the step."""
        assert self.is_on, "a moment of a step that is not timed"
        chosen = self._lane.compute if stream is None else stream
        if self._lane.is_captured:
            return CudaEvent(self._lane.device).record(chosen, is_external=True)
        if self._used_count == len(self._events):
            self._events.append(CudaEvent(self._lane.device))
        self._used_count += 1
        return self._events[self._used_count - 1].record(chosen)

    def note(self, note: Note) -> None:
        assert self.is_on, "a note on a step that is not timed"
        self._notes.append(note)

    def recorded(self) -> tuple[Note, ...]:
        """The notes of a step that is captured; `replayed` has them again."""
        return tuple(self._notes) if self.is_on else ()

    def replayed(self, notes: tuple[Note, ...]) -> None:
        if self.is_on:
            self._notes = list(notes)
        elif notes:  # which records them again, read or not
            self._is_pending = False

    def seal(self, claimed: Tensor) -> None:
        """All of the step is queued; `claimed` [parts, groups] slots are fetched into."""
        if self.is_on:
            self._claimed.copy_(claimed.sum(dim=0), non_blocking=True)
            self._ended.record(self._lane.compute)
            self.is_on, self._is_pending = False, True

    def read(self) -> None:
        """Tells what the latest timed step has noted, if it is over."""
        if not self._is_pending or not self._ended.done():
            return
        if self._tells:
            for note in self._notes:
                note(self._at)
            self.moved_rows += self._claimed.numpy()
        self._is_pending = False

    def _at(self, event: CudaEvent) -> int:
        """Nanoseconds of the host's clock, as if the step had begun when its first event was
        queued."""
        return self._began_ns + event.ns_since(self._began)

    def check(self) -> None:
        assert not (self.is_on and self._is_pending), "two steps are timed at once"
        assert self._used_count <= len(self._events), "an event is lost"


class TimedFetch:
    """A layer's fetch: from when to when it was on the lane, and what compute waited for it."""

    def __init__(
        self, watch: Stopwatch, timings: Timings, layer: int, lane: int, *, is_ahead: bool
    ) -> None:
        self._watch = watch
        self._timings = timings
        self._layer = layer
        self._lane = lane
        self._is_ahead = is_ahead
        self._started = watch.mark(lane)
        self._finished = self._started
        self._waits: tuple[CudaEvent, CudaEvent] | None = None

    def queued(self) -> None:
        self._finished = self._watch.mark(self._lane)
        self._watch.note(self._tell)

    def hold(self, event: CudaEvent, stream: int) -> None:
        """Compute waits for the fetch's event."""
        started = self._watch.mark()
        event.hold(stream)
        if self._waits is None:
            self._waits = started, self._watch.mark()

    def _tell(self, at: At) -> None:
        waited_ns = 0 if self._waits is None else at(self._waits[1]) - at(self._waits[0])
        started_ns, finished_ns = at(self._started), at(self._finished)
        self._timings.count(
            self._layer, started_ns, finished_ns, waited_ns, is_ahead=self._is_ahead
        )
