"""The tests' lane: it delays copies as long as it may, and repeats itself for the same seed.

A job runs when its time has come, when a caller waits for it, or when told. Until then its target
rows hold 0xFF, which is NaN in e4m3, bf16 and f32: a read before the wait is always noticed. Rows
that a job in the queue has still to read are spared: they must hold their old bytes until then.
Time is counted in ticks, and so are the events' times: each `done()` and each `advance()` is one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput, BadState
from ess.flashtrans.rows import check_row_numbers, run_numpy
from ess.flashtrans.views import CheckedCopy, Side, check
from ess.kernels.streams import Event, RowCopy, closed_lane


class ManualLane:
    """`delay_max` bounds the random ticks between submission and completion."""

    def __init__(self, *, seed: int = 0, delay_max: int = 3) -> None:
        if delay_max < 0:
            raise BadInput(f"delay_max is {delay_max}, must not be negative")
        self._random = np.random.default_rng(seed)
        self._delay_max = delay_max
        self._ticks = 0
        self._held = False
        self._closed = False
        self._jobs: deque[_ManualJob] = deque()
        self._last = _ManualJob(self, 0, 0, [], finished=0)

    def submit(self, copies: Sequence[RowCopy]) -> Event:
        if self._closed:
            raise closed_lane()
        checked = [with_own_lists(check(copy)) for copy in copies]
        for copy in checked:
            check_row_numbers(copy)
        delay = int(self._random.integers(0, self._delay_max + 1))
        self._last = _ManualJob(self, self._ticks, self._ticks + delay, checked)
        self._jobs.append(self._last)
        for copy in checked:
            self._poison(copy)
        return self._last

    def mark(self) -> Event:
        return self._last

    def close(self) -> None:
        self.release()
        self.run_all()
        self._closed = True

    def advance(self, ticks: int = 1) -> None:
        """Time passes; the jobs whose time has come run, in order."""
        self._ticks += ticks
        while self._jobs and self._jobs[0].due <= self._ticks and not self._held:
            self._run_first()

    def run_all(self) -> None:
        while self._jobs:
            self._run_first()

    def hold(self) -> None:
        """Nothing completes until release(): a device that hangs."""
        self._held = True

    def release(self) -> None:
        self._held = False

    @property
    def pending_count(self) -> int:
        return len(self._jobs)

    def run_until(self, job: _ManualJob, timeout_s: float | None) -> None:
        """For events: completes `job` and all before it."""
        if self._held and not job.over:
            if timeout_s is None:
                raise BadState("waiting for ever: the lane is held and the wait has no timeout")
            raise TimeoutError(f"the copy job is not done after {timeout_s} s: the lane is held")
        while not job.over:
            self._run_first()

    def _run_first(self) -> None:
        job = self._jobs.popleft()
        for copy in job.copies:
            run_numpy(copy)
        job.copies.clear()
        job.finished = self._ticks

    def _poison(self, copy: CheckedCopy) -> None:
        targets = _written_rows(copy)
        spared = np.zeros(len(targets), np.bool_)
        for job in self._jobs:
            for earlier in job.copies:
                spared |= _overlapping(copy.target, targets, earlier.source)
        copy.target.as_bytes()[targets[~spared]] = 0xFF

    def __enter__(self) -> ManualLane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(eq=False)
class _ManualJob:
    lane: ManualLane
    started: int
    due: int
    copies: list[CheckedCopy] = field(repr=False)
    finished: int | None = None

    @property
    def over(self) -> bool:
        return self.finished is not None

    def done(self) -> bool:
        self.lane.advance()
        return self.over

    def wait(self, timeout_s: float | None = None) -> None:
        self.lane.run_until(self, timeout_s)

    @property
    def started_ns(self) -> int:
        return min(self.started, self.finished_ns)

    @property
    def finished_ns(self) -> int:
        if self.finished is None:
            raise BadState("the copy job is not done: it has no times yet")
        return self.finished


def with_own_lists(copy: CheckedCopy) -> CheckedCopy:
    """The caller may change his lists once a job has been submitted."""
    return CheckedCopy(*(_with_own_list(side) for side in (copy.source, copy.target)))


def _with_own_list(side: Side) -> Side:
    return side if side.rows is None else replace(side, rows=side.rows.copy())


def _written_rows(copy: CheckedCopy) -> npt.NDArray[np.int64]:
    source_rows, target_rows = copy.source.row_numbers(), copy.target.row_numbers()
    return target_rows[(source_rows >= 0) & (target_rows >= 0)].astype(np.int64)


def _overlapping(
    side: Side, row_numbers: npt.NDArray[np.int64], other: Side
) -> npt.NDArray[np.bool_]:
    """Which of the rows share a byte with a row that `other` names."""
    starts = side.address + row_numbers * side.stride_bytes
    read = other.row_numbers().astype(np.int64)
    taken = np.sort(other.address + read[read >= 0] * other.stride_bytes)
    if not taken.size:
        return np.zeros(len(starts), np.bool_)
    first = np.searchsorted(taken, starts - other.row_bytes, side="right")
    following = taken[np.minimum(first, taken.size - 1)]
    return (first < taken.size) & (following < starts + side.row_bytes)
