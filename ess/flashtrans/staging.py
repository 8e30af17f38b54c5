"""Fetches through the copy engine: the host gathers, one DMA per chunk sends, no SM is busy.

A host function on a stream of its own gathers a chunk of rows into pinned memory, so no Python
thread is involved. Then the chunk is copied to its twin on the device, and a kernel spreads it over
its targets within microseconds, at the speed of device memory. Places take turns: the host gathers
into some while others are sent. Two events per place keep the order: after `gathered` the chunk may
be sent, after `spread` the host may gather into the place again.

Native code (csrc/cpu/moves/copy_engine.cpp) queues all chunks of a fetch: a call from Python would
cost as much as a megabyte on the wire. Chunks begin small, as nothing is sent while the first is
gathered, and double until they fill a place.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ess.errors import Unavailable
from ess.flashtrans.mover import Launch
from ess.flashtrans.native_rows import NativeCopy, pack
from ess.flashtrans.rows import STREAM_ABOVE_BYTES
from ess.flashtrans.views import CheckedCopy, Side
from ess.flashtrans.ways import settle
from ess.kernels.cpu import native
from ess.kernels.cuda.driver import Device, entry, fault
from ess.kernels.cuda.memory import DeviceMemory
from ess.kernels.cuda.pinned import pinned_memory
from ess.kernels.cuda.rows import LINE_BYTES, MoveRecord
from ess.kernels.cuda.streams import CudaEvent, CudaStream

PLACES: Final = 4
PLACE_BYTES: Final = 8 << 20
FIRST_PART: Final = 8
CALLS: Final = (
    "cuLaunchHostFunc",
    "cuMemcpyHtoDAsync",
    "cuLaunchKernel",
    "cuEventRecord",
    "cuStreamWaitEvent",
)


class HostJob(ctypes.Structure):
    """RowJob of csrc/cpu/moves/rows.h."""

    _fields_ = (
        ("copy", NativeCopy),
        ("threads", ctypes.c_int64),
        ("stream_above", ctypes.c_int64),
    )


class StagedFetch(ctypes.Structure):
    """StagedFetch of csrc/cpu/moves/copy_engine.cpp."""

    _fields_ = (
        ("driver", ctypes.c_void_p * len(CALLS)),
        ("gathering", ctypes.c_void_p),
        ("sending", ctypes.c_void_p),
        ("host", ctypes.c_void_p),
        ("twin", ctypes.c_uint64),
        ("place_bytes", ctypes.c_int64),
        ("place_count", ctypes.c_int64),
        ("turn", ctypes.c_int64),
        ("gathered", ctypes.c_void_p),
        ("spread", ctypes.c_void_p),
        ("copy", NativeCopy),
        ("threads", ctypes.c_int64),
        ("stream_above", ctypes.c_int64),
        ("jobs", ctypes.c_void_p),
        ("chunk_rows", ctypes.c_void_p),
        ("chunk_count", ctypes.c_int64),
        ("kernel", ctypes.c_void_p),
        ("move", MoveRecord),
        ("block_threads", ctypes.c_int64),
        ("block_rows", ctypes.c_int64),
        ("block_count_max", ctypes.c_int64),
    )


class Staging:
    """Places of `place_bytes` in pinned memory of the host, and their twins on the device."""

    def __init__(self, device: Device, *, place_bytes: int = PLACE_BYTES, threads: int = 2) -> None:
        if not native.available():
            raise Unavailable(f"the copy engine needs the native gather: {native.why_missing()}")
        assert place_bytes % LINE_BYTES == 0, f"a place of {place_bytes} bytes: no whole lines"
        assert threads > 0, f"{threads} threads"
        settle()
        self.place_bytes = place_bytes
        self._device = device
        self._host = pinned_memory(device, PLACES * place_bytes, touch_threads=1)
        self._twin = DeviceMemory(device, PLACES * place_bytes)
        self._gathering = CudaStream(device)
        self._events = [CudaEvent(device) for _ in range(2 * PLACES)]
        handles = [event.handle for event in self._events]
        self._gathered = (ctypes.c_void_p * PLACES)(*handles[:PLACES])
        self._spread = (ctypes.c_void_p * PLACES)(*handles[PLACES:])
        self._fetch = StagedFetch(
            driver=(ctypes.c_void_p * len(CALLS))(*map(entry, CALLS)),
            gathering=self._gathering.handle,
            host=int(self._host.__array_interface__["data"][0]),
            twin=self._twin.address,
            place_bytes=place_bytes,
            place_count=PLACES,
            gathered=ctypes.addressof(self._gathered),
            spread=ctypes.addressof(self._spread),
            threads=threads,
            stream_above=STREAM_ABOVE_BYTES,
        )

    def rows_max(self, row_bytes: int) -> int:
        assert row_bytes > 0, f"rows of {row_bytes} bytes"
        return self.place_bytes // row_bytes

    def as_source(self, copy: CheckedCopy) -> Side:
        """The source that the spreading kernel reads: the copy's rows side by side from the first
        place on."""
        row_bytes, count = copy.source.row_bytes, copy.count
        return Side("source", self, self._twin.address, count, row_bytes, row_bytes, None, True)

    def send(
        self,
        copy: CheckedCopy,
        spreading: Launch,
        after: CudaEvent,
        stream: int,
        *,
        kept: list[Any],
    ) -> None:
        """Gathers the sources of `copy` when `after` has passed, sends and spreads them.

        `spreading` is the kernel for all rows at once, from the first place on; every chunk gets
        its part of it. What is added to `kept` must live until `stream` has come this far, also
        where this raises, since some of the chunks may be queued. The source's list is copied, as
        the host may read it after the caller has changed it.
        """
        assert not copy.source.on_device, "the host gathers rows of the host only"
        assert copy.source.device_rows is None, "the host cannot read a list on a device"
        rows = list(chunks(copy.count, self.rows_max(copy.source.row_bytes)))
        numbers = None if copy.source.rows is None else copy.source.rows.copy()
        sizes, jobs = np.array(rows, np.int64), (HostJob * len(rows))()
        kept += [copy, numbers, jobs]
        after.hold(self._gathering.handle)
        self._describe(copy, numbers, spreading)
        fetch = self._fetch
        fetch.sending, fetch.jobs = stream, ctypes.addressof(jobs)
        fetch.chunk_rows, fetch.chunk_count = native.address(sizes), len(rows)
        self._device.make_current()
        status = _staged_fetch()(ctypes.byref(fetch))
        if status:
            self._gathering.record().hold(stream)
            raise fault("a fetch by the copy engine", status)

    def _describe(
        self, copy: CheckedCopy, numbers: npt.NDArray[Any] | None, spreading: Launch
    ) -> None:
        fetch, row_bytes = self._fetch, copy.source.row_bytes
        target = Side("target", self, fetch.host, copy.count, row_bytes, row_bytes, None)
        fetch.copy = pack(CheckedCopy(replace(copy.source, rows=numbers), target))
        fetch.kernel, fetch.move = spreading.kernel.handle, spreading.record
        fetch.block_threads, fetch.block_rows = spreading.form.threads, spreading.form.block_rows
        fetch.block_count_max = spreading.block_count_max

    def check(self) -> None:
        """Audits the state between two copies."""
        assert 0 <= self._fetch.turn < PLACES, f"the next place is {self._fetch.turn} of {PLACES}"
        assert len(self._events) == 2 * PLACES, "a place without its events"


def chunks(count: int, most: int) -> Iterator[int]:
    """How many rows each chunk has: few at first, doubling up to `most`."""
    assert count > 0, f"{count} rows"
    assert most > 0, "a place holds no row"
    rows = max(1, most // FIRST_PART)
    while count > 0:
        yield min(rows, count)
        count -= rows
        rows = min(2 * rows, most)


@functools.cache
def _staged_fetch() -> Callable[..., int]:
    return native.function("ess_staged_fetch", [ctypes.c_void_p], ctypes.c_int32)
