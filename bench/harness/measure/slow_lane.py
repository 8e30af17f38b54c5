"""A copy lane over another: it times every job and can slow the link down to a set rate.

The lane below really moves the rows, in its own thread. A paced job is over when its bytes would
have passed a link of the set rate, one job after another: a thread that waits for the job sleeps
until then, and `done()` is false before. So everything that can go wrong with a slow link can go
wrong here, with one exception: a row may land before it is due. No reader may look at a row before
the event of its job.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ess.errors import BadInput
from ess.flashtrans.lanes import open_lane
from ess.flashtrans.views import check
from ess.kernels.streams import Event, Lane, RowCopy


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """One submission. `waits_ns` are the times in which a thread waited for it."""

    lane_event: Event
    byte_count: int
    submitted_ns: int
    due_ns: int
    starts_ns: int
    waits_ns: list[tuple[int, int]] = field(default_factory=list)

    def done(self) -> bool:
        return time.monotonic_ns() >= self.due_ns and self.lane_event.done()

    def wait(self, timeout_s: float | None = None) -> None:
        called_ns = time.monotonic_ns()
        left_s = (self.due_ns - called_ns) / 1e9
        if timeout_s is not None and left_s > timeout_s:
            time.sleep(timeout_s)
            raise TimeoutError(f"the copy job is not done after {timeout_s} s")
        self.lane_event.wait(timeout_s)
        left_s = (self.due_ns - time.monotonic_ns()) / 1e9
        if left_s > 0:
            time.sleep(left_s)
        self.waits_ns.append((called_ns, time.monotonic_ns()))

    @property
    def started_ns(self) -> int:
        return self.starts_ns or self.lane_event.started_ns

    @property
    def finished_ns(self) -> int:
        return max(self.due_ns, self.lane_event.finished_ns)

    @property
    def busy_us(self) -> float:
        return (self.finished_ns - self.started_ns) / 1e3

    @property
    def waited_us(self) -> float:
        return sum(end - start for start, end in self.waits_ns) / 1e3

    @property
    def window_us(self) -> float | None:
        """The time from submission to the first wait: what this job could hide behind."""
        return (self.waits_ns[0][0] - self.submitted_ns) / 1e3 if self.waits_ns else None


class TimedLane:
    """Keeps its jobs until they are taken. With `bytes_per_us` None it is as fast as the lane
    below, by default one whose copies all run beside compute, like those over a link."""

    def __init__(self, *, bytes_per_us: float | None = None, below: Lane | None = None) -> None:
        self._below = below or open_lane(at_once_bytes=0)
        self._jobs: list[Job] = []
        self._free_ns = 0
        self.bytes_per_us = bytes_per_us

    def pace(self, bytes_per_us: float | None) -> None:
        if bytes_per_us is not None and not bytes_per_us > 0:
            raise BadInput(f"a link of {bytes_per_us} bytes per microsecond; rates are above 0")
        self.bytes_per_us = bytes_per_us

    def submit(self, copies: Sequence[RowCopy]) -> Event:
        now = time.monotonic_ns()
        byte_count = sum(copy.count * copy.source.row_bytes for copy in map(check, copies))
        starts, due = 0, 0
        if self.bytes_per_us is not None:
            starts = max(now, self._free_ns)
            self._free_ns = due = starts + int(byte_count / self.bytes_per_us * 1e3)
        job = Job(
            lane_event=self._below.submit(copies),
            byte_count=byte_count,
            submitted_ns=now,
            due_ns=due,
            starts_ns=starts,
        )
        self._jobs.append(job)
        return job

    def mark(self) -> Event:
        """An event of its own that is done with the last job."""
        return Job(
            lane_event=self._below.mark(),
            byte_count=0,
            submitted_ns=time.monotonic_ns(),
            due_ns=self._free_ns,
            starts_ns=self._free_ns,
        )

    def take_jobs(self) -> list[Job]:
        """The jobs since the last call."""
        taken, self._jobs = self._jobs, []
        return taken

    def close(self) -> None:
        self._below.close()
