"""Copy lanes of the CPU: a native worker thread, or the caller's own thread.

Both keep the contract of ess.kernels.streams.Lane; tests.support.manual_lane has the tests' lane.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ess.errors import BadInput, BadState, Unavailable
from ess.flashtrans import rows
from ess.flashtrans.native_rows import NativeFault, packed
from ess.flashtrans.views import CheckedCopy, check
from ess.flashtrans.ways import settle
from ess.kernels.cpu import native
from ess.kernels.streams import Event, Lane, RowCopy, closed_lane

# Waits are cut into slices so that a signal, Ctrl-C above all, reaches Python.
SLICE_S: Final = 0.2

# A copy of this size takes as long as waking a worker and waiting for it (docs/log.md).
AT_ONCE_BYTES: Final = 512 << 10


def open_lane(*, device: str = "cpu", threads: int = 1, at_once_bytes: int = AT_ONCE_BYTES) -> Lane:
    """The fastest lane of a device, "cpu" or "cuda:0", that this machine can run.

    A copy may use up to `threads` threads of the host. On a CPU a job of at most `at_once_bytes`
    is copied by the caller: that takes less time than waking a worker.
    """
    kind, _, ordinal = device.partition(":")
    if kind == "cuda" and (ordinal or "0").isdigit():
        return _stream_lane(int(ordinal or 0), threads)
    if device != "cpu":
        raise BadInput(f"there is no lane for {device!r}; there are lanes for cpu and cuda:0")
    if not native.available():
        return InlineLane(threads=threads)
    return WorkerLane(threads=threads, at_once_bytes=at_once_bytes)


def _stream_lane(ordinal: int, threads: int) -> Lane:
    """A lane whose jobs follow torch's current stream at submission, or the default stream if torch
    is not loaded."""
    from ess.flashtrans.stream_lane import StreamLane
    from ess.kernels.cuda.driver import Device

    def current() -> int:
        torch: Any = sys.modules.get("torch")
        return 0 if torch is None else int(torch.cuda.current_stream(ordinal).cuda_stream)

    return StreamLane(Device(ordinal), compute_stream=current, threads=threads)


class DoneEvent:
    """An event of a job that was copied during submission: it is done."""

    def __init__(self, started_ns: int, finished_ns: int) -> None:
        assert started_ns <= finished_ns, f"started at {started_ns}, finished at {finished_ns}"
        self.started_ns = started_ns
        self.finished_ns = finished_ns

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        pass


class InlineLane:
    """Copies in the caller's thread at submission: without a native library, or to debug."""

    def __init__(self, *, threads: int = 1) -> None:
        rows.check_threads(threads)
        self._threads = threads
        self._closed = False
        self._last = DoneEvent(0, 0)

    def submit(self, copies: Sequence[RowCopy]) -> Event:
        if self._closed:
            raise closed_lane()
        checked = [check(copy) for copy in copies]
        for copy in checked:
            rows.check_row_numbers(copy)
        started_ns = time.monotonic_ns()
        for copy in checked:
            rows.run(copy, threads=self._threads)
        self._last = DoneEvent(started_ns, time.monotonic_ns())
        return self._last

    def mark(self) -> Event:
        return self._last

    def close(self) -> None:
        self._closed = True

    def __enter__(self) -> InlineLane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WorkerLane:
    """One native thread that sleeps until there is a job.

    A job of at most `at_once_bytes` is copied at submission if no other job is under way.

    The native side keeps bare addresses. `_pending` keeps alive what lies there, matrices and
    timestamps, until the job is complete; it outlives this object, because the finalizer, which
    waits for the jobs, holds it too. Events hold the lane, so they may be waited for after close(),
    from any thread. In a forked child, where the worker does not exist, every call but close()
    raises BadState. For this, calls ask the native side before they take the lock: if another
    thread held the lock at the fork, nothing in the child would ever release it.
    """

    def __init__(self, *, threads: int = 1, at_once_bytes: int = 0) -> None:
        rows.check_threads(threads)
        settle()
        self.at_once_bytes = at_once_bytes
        self._handle = _native("open")(threads, rows.STREAM_ABOVE_BYTES, at_once_bytes)
        if not self._handle:
            raise Unavailable("the system has no thread left for a copy lane")
        self._order = threading.Lock()
        self._pending: deque[_Job] = deque()
        self._last = _Job(0, (ctypes.c_int64 * 2)(), [])
        weakref.finalize(self, _release, self._handle, self._pending)

    def submit(self, copies: Sequence[RowCopy]) -> Event:
        checked = [check(copy) for copy in copies]
        joined = b"".join(map(packed, checked))
        times, fault, at_once = (ctypes.c_int64 * 2)(), NativeFault(), ctypes.c_int32()
        completed = self.completed()
        with self._order:
            sequence = _native("submit")(
                self._handle, joined, len(checked), times, ctypes.byref(fault), at_once
            )
            if sequence <= 0:
                raise _refusal(sequence) if sequence else fault.error(checked)
            assert sequence > self._last.sequence, f"job {sequence} after {self._last.sequence}"
            assert completed < sequence, f"job {sequence} was complete before it was there"
            self._last = _Job(sequence, times, [])
            self._forget(completed)
            if at_once:
                assert times[1] > 0, f"job {sequence} was copied at once and has no times"
                return DoneEvent(*times)
            self._pending.append(_Job(sequence, times, checked))
        return WorkerEvent(self, sequence, times)

    def mark(self) -> Event:
        return WorkerEvent(self, self._last.sequence, self._last.times)

    def close(self) -> None:
        """Waits for all jobs; in a forked child does nothing, and leaves the parent's lane
        alone."""
        _native("close")(self._handle)
        completed = _native("completed")(self._handle)
        if completed >= 0:
            with self._order:
                self._forget(completed)

    def completed(self) -> int:
        """The number of the last complete job; jobs count from 1."""
        return _answer(_native("completed")(self._handle))

    def wait(self, sequence: int, timeout_s: float) -> bool:
        """Waits for job `sequence`; returns whether it is complete."""
        done = _answer(_native("wait")(self._handle, sequence, int(timeout_s * 1e9)))
        if done:
            with self._order:
                self._forget(sequence)
        return bool(done)

    def check(self) -> None:
        with self._order:
            numbers = [job.sequence for job in self._pending]
            assert numbers == sorted(set(numbers)), f"jobs {numbers} are not in order"
            assert not numbers or numbers[0] > 0, "jobs count from 1"
            assert not numbers or numbers[-1] <= self._last.sequence, f"{numbers} after the latest"

    def _forget(self, completed: int) -> None:
        assert completed <= self._last.sequence, f"job {completed} is complete and was never given"
        while self._pending and self._pending[0].sequence <= completed:
            self._pending.popleft()

    def __enter__(self) -> WorkerLane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WorkerEvent:
    def __init__(self, lane: WorkerLane, sequence: int, times: ctypes.Array[ctypes.c_int64]):
        self._lane = lane
        self._sequence = sequence
        self._times = times

    def done(self) -> bool:
        return self._lane.completed() >= self._sequence

    def wait(self, timeout_s: float | None = None) -> None:
        ends_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._lane.wait(
            self._sequence, max(0.0, min(SLICE_S, ends_s - time.monotonic()))
        ):
            if time.monotonic() >= ends_s:
                raise TimeoutError(f"copy job {self._sequence} is not done after {timeout_s} s")

    @property
    def started_ns(self) -> int:
        return self._time_ns(0)

    @property
    def finished_ns(self) -> int:
        return self._time_ns(1)

    def _time_ns(self, end: int) -> int:
        if not self.done():
            raise BadState(f"copy job {self._sequence} is not done: it has no times yet")
        assert self._times[0] <= self._times[1], f"job {self._sequence} ended before it began"
        return self._times[end]


@dataclass(frozen=True, slots=True)
class _Job:
    sequence: int
    times: ctypes.Array[ctypes.c_int64]
    copies: list[CheckedCopy]


def _release(handle: int, pending: deque[_Job]) -> None:
    """Closes the lane, which waits for its jobs; `pending` keeps their memory until then."""
    assert handle, "a lane that was never opened"
    _native("close")(handle)
    _native("free")(handle)
    pending.clear()


def _answer(value: int) -> int:
    if value < 0:
        raise _refusal(value)
    return value


def _refusal(answer: int) -> Exception:
    match answer:
        case -1:
            return closed_lane()
        case -2:
            return BadState(
                "the copy lane belongs to the parent process: open another after a fork"
            )
        case _:
            return MemoryError("no memory for the index lists of a copy job")


@functools.cache
def _native(name: str) -> Callable[..., Any]:
    lane = ctypes.c_void_p
    signatures: dict[str, tuple[list[Any], Any]] = {
        "open": ([ctypes.c_int32, ctypes.c_int64, ctypes.c_int64], lane),
        "submit": (
            [lane, lane, ctypes.c_int64, lane, lane, ctypes.POINTER(ctypes.c_int32)],
            ctypes.c_int64,
        ),
        "wait": ([lane, ctypes.c_int64, ctypes.c_int64], ctypes.c_int64),
        "completed": ([lane], ctypes.c_int64),
        "close": ([lane], None),
        "free": ([lane], None),
    }
    return native.function(f"ess_lane_{name}", *signatures[name])
