"""Fetches through the copy engine: the host gathers, one DMA per chunk sends, no SM is taken.

A host function on a stream of its own gathers a chunk of rows into pinned memory, so no thread of
Python is involved. Then the chunk is sent to a twin on the device, and a kernel that runs for a few
microseconds, at the speed of device memory, spreads it over its targets. Two places take turns: the
host gathers into one while the other is sent. Two events for each place keep this order: after
`gathered` the chunk may be sent, after `spread` the host may gather into the place again.
"""

from __future__ import annotations

import ctypes
from typing import Final

from ess.errors import Unavailable
from ess.flashtrans.rows import STREAM_ABOVE_BYTES, NativeCopy, pack
from ess.flashtrans.views import CheckedCopy, Side
from ess.kernels.cpu import native
from ess.kernels.cuda.driver import Device, call
from ess.kernels.cuda.memory import DeviceMemory
from ess.kernels.cuda.pinned import pinned_memory
from ess.kernels.cuda.streams import CudaEvent, CudaStream

PLACES: Final = 2


class HostJob(ctypes.Structure):
    """RowJob of csrc/cpu/rows.cpp."""

    _fields_ = (
        ("copy", NativeCopy),
        ("threads", ctypes.c_int64),
        ("stream_above", ctypes.c_int64),
    )


class Staging:
    """Two places of `place_bytes` in pinned memory of the host, and their twins on the device."""

    def __init__(self, device: Device, *, place_bytes: int = 1 << 20, threads: int = 2) -> None:
        if not native.available():
            raise Unavailable(f"the copy engine needs the native gather: {native.why_missing()}")
        assert place_bytes % 4 == 0, f"a place of {place_bytes} bytes: the next is not at a word"
        assert threads > 0, f"{threads} threads"
        self.place_bytes = place_bytes
        self._threads = threads
        self._host = pinned_memory(device, PLACES * place_bytes, touch_threads=1)
        self._twin = DeviceMemory(device, PLACES * place_bytes)
        self._gathering = CudaStream(device)
        self._gathered = [CudaEvent(device) for _ in range(PLACES)]
        self._spread = [CudaEvent(device) for _ in range(PLACES)]
        self._turn = 0
        self._sent = False

    def rows_max(self, row_bytes: int) -> int:
        assert row_bytes > 0, f"rows of {row_bytes} bytes"
        return self.place_bytes // row_bytes

    def send(self, copy: CheckedCopy, after: CudaEvent, stream: int) -> tuple[int, HostJob]:
        """Gathers the sources of a chunk when `after` has passed, and sends them on the stream.

        Returns the device address from which they will lie side by side, and the host's job, which
        must live until then. Queue the kernel that takes them from there, then call `spread`.
        """
        row_bytes, count = copy.source.row_bytes, copy.count
        assert 0 < count <= self.rows_max(row_bytes), f"{count} rows in {self.place_bytes} bytes"
        assert not self._sent, "the chunk before this one has not been spread"
        assert not copy.source.on_device, "the host gathers rows of the host only"
        assert copy.source.device_rows is None, "the host cannot read a list on a device"
        here = int(self._host.__array_interface__["data"][0]) + self._turn * self.place_bytes
        dense = Side("target", None, here, count, row_bytes, row_bytes, None)
        job = HostJob(pack(CheckedCopy(copy.source, dense)), self._threads, STREAM_ABOVE_BYTES)
        after.hold(self._gathering.handle)
        self._spread[self._turn].hold(self._gathering.handle)
        function = native.function("ess_rows_copy_job", [ctypes.c_void_p])
        assert job.copy.count == count, f"the host would gather {job.copy.count} rows of {count}"
        entry = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
        call("cuLaunchHostFunc", self._gathering.handle, entry, ctypes.addressof(job))
        self._gathered[self._turn].record(self._gathering.handle).hold(stream)
        there = self._twin.address + self._turn * self.place_bytes
        call("cuMemcpyHtoDAsync", there, here, count * row_bytes, stream)
        self._sent = True
        return there, job

    def spread(self, stream: int) -> None:
        """The kernel that takes the last chunk's rows is queued: after it the place is free."""
        assert self._sent, "no chunk has been sent"
        self._spread[self._turn].record(stream)
        self._turn = (self._turn + 1) % PLACES
        self._sent = False

    def check(self) -> None:
        """What holds between two copies."""
        assert 0 <= self._turn < PLACES, f"the next place is {self._turn} of {PLACES}"
        assert not self._sent, "a chunk was sent and never spread: its place is never free again"
        assert len(self._gathered) == len(self._spread) == PLACES, "a place without its events"
