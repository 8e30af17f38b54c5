"""Streams and events of a device, for copies that run beside compute.

Torch's streams and ours are the same kind of handle: events order work on either.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import Any, Final

from ess.errors import BadState
from ess.kernels.cuda.driver import NOT_READY, Device, attempt, call, fault

POLL_S_MIN: Final = 20e-6
POLL_S_MAX: Final = 1e-3
NON_BLOCKING: Final = 1
EXTERNAL: Final = 1


class CudaEvent:
    """A moment on a stream."""

    def __init__(self, device: Device) -> None:
        device.make_current()
        self._device = device
        self.handle = int(call("cuEventCreate", 0))
        weakref.finalize(self, _release, device, "cuEventDestroy", self.handle)

    def record(self, stream: int, *, is_external: bool = False) -> CudaEvent:
        """`is_external`, only while the stream is captured: every replay records the event, so that
        it has a time. Without it the event orders what is captured, and no more."""
        self._device.make_current()
        if is_external:
            call("cuEventRecordWithFlags", self.handle, stream, EXTERNAL)
        else:
            call("cuEventRecord", self.handle, stream)
        return self

    def hold(self, stream: int) -> None:
        """Work queued on `stream` from now on waits for this; the host does not."""
        self._device.make_current()
        call("cuStreamWaitEvent", stream, self.handle, 0)

    def done(self) -> bool:
        self._device.make_current()
        status, *_ = attempt("cuEventQuery", self.handle)
        if status not in (0, NOT_READY):
            raise fault("cuEventQuery", status)
        return bool(status == 0)

    def wait(self, timeout_s: float | None = None) -> None:
        """Asleep between looks: signals reach Python, and a hung device is an error."""
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = POLL_S_MIN
        while not self.done():
            if ends_s is not None and time.monotonic() >= ends_s:
                raise TimeoutError(f"the device is not done after {timeout_s} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S_MAX)

    def us_since(self, earlier: CudaEvent) -> float:
        if not self.done():
            raise BadState("the event is not done: it has no time yet")
        return self.ns_since(earlier) / 1e3

    def ns_since(self, earlier: CudaEvent) -> int:
        """Nanoseconds since an earlier event; both have passed."""
        return round(1e6 * float(call("cuEventElapsedTime", earlier.handle, self.handle)))


class CudaStream:
    """A new stream; a `priority` below zero goes first."""

    def __init__(self, device: Device, *, priority: int = 0) -> None:
        device.make_current()
        self._device = device
        self.handle = int(call("cuStreamCreateWithPriority", NON_BLOCKING, priority))
        weakref.finalize(self, _release, device, "cuStreamDestroy", self.handle)

    def record(self) -> CudaEvent:
        return CudaEvent(self._device).record(self.handle)

    def synchronize(self) -> None:
        self.record().wait()


def let_go(device: Device, kept: deque[Any]) -> None:
    """Copies of a lane that was not closed still run: what they use stays until they are over."""
    device.wait_for_all()
    kept.clear()


def _release(device: Device, name: str, handle: int) -> None:
    """At interpreter exit the driver may be gone already; then so is the handle."""
    attempt("cuCtxSetCurrent", device.context)
    attempt(name, handle)
