"""Host memory that the device reads and writes in place: registered in chunks, whole rows each.

One registration of hundreds of gigabytes takes minutes without a sign of life and some drivers
refuse it, so a pool is registered chunk by chunk. Drivers have also refused less, once and not
again, where devices were nearly full: a chunk that is refused is registered in halves. A chunk ends
where a row and a page end, since no row may lie in two and no page may be registered twice. Under
unified addressing the device sees registered memory where the host does; a system that maps it
elsewhere could not promise that the chunks stay side by side, and is refused. Kernels do not see
where chunks meet; a copy of the driver must not cross there, and `copy_to_device` and
`copy_to_host` of ess.kernels.cuda.memory do not.

Pages lie near the device, where the system grants that, and forked processes do not have them.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput, Unavailable
from ess.kernels.cuda.driver import Device, attempt, call, fault
from ess.kernels.cuda.numa import keep_from_children, prefer_node
from ess.kernels.memory import host_memory, touch
from ess.units import align_up, format_bytes

Bytes = npt.NDArray[np.uint8]

CHUNK_BYTES: Final = 64 << 30
HALVED_BYTES_MIN: Final = 256 << 20
REFUSALS: Final = (1, 2)
"""An invalid value, no memory: as drivers answer where a part of it may be had."""
TOUCH_THREADS_MAX: Final = 16
PORTABLE: Final = 1
MAPPED: Final = 2


def pinned_memory(
    device: Device,
    byte_count: int,
    *,
    row_bytes: int = 1,
    touch_threads: int | None = None,
) -> Bytes:
    """Zeroed, on huge pages where the system has them. The last view that goes frees it. A thread
    of each core touches it, at most 16, unless `touch_threads` says how many: the first touch of a
    large pool takes as long as all else at a start."""
    memory = host_memory(align_up(byte_count, mmap.PAGESIZE))
    prefer_node(memory, device.host_node)
    cores = min(len(os.sched_getaffinity(0)), TOUCH_THREADS_MAX)
    touch(memory, cores if touch_threads is None else touch_threads)
    register(device, memory, row_bytes=row_bytes)
    return memory[:byte_count]


def register(
    device: Device, memory: Bytes, *, row_bytes: int, chunk_bytes: int = CHUNK_BYTES
) -> None:
    """Until the memory is freed."""
    start = memory.__array_interface__["data"][0]
    if start % mmap.PAGESIZE or memory.nbytes % mmap.PAGESIZE:
        raise BadInput(f"memory at {start:#x} of {memory.nbytes} bytes is not whole pages")
    device.make_current()
    done: list[int] = []
    try:
        for at, size in chunks(memory.nbytes, row_bytes=row_bytes, chunk_bytes=chunk_bytes):
            for begin, count in _locked(start + at, size, _unit(row_bytes)):
                done.append(begin)
                device.pinned.add(begin, count)
                _require_same_address(begin)
        keep_from_children(memory)
    except BaseException:
        _unregister(device, done)
        raise
    weakref.finalize(_owner(memory), _unregister, device, done)


def _locked(address: int, size: int, unit: int) -> Iterator[tuple[int, int]]:
    """Registers a chunk: whole, or in parts of which each is told when the driver has it."""
    status, *_ = attempt("cuMemHostRegister", address, size, PORTABLE | MAPPED)
    half = size // 2 // unit * unit
    if status in REFUSALS and half >= HALVED_BYTES_MIN:
        yield from _locked(address, half, unit)
        yield from _locked(address + half, size - half, unit)
    elif status:
        raise Unavailable(
            f"{format_bytes(size)} of host memory: {fault('cuMemHostRegister', status)}"
        )
    else:
        yield address, size


def _unit(row_bytes: int) -> int:
    """The least that is whole rows and whole pages."""
    return math.lcm(row_bytes, mmap.PAGESIZE)


def chunks(byte_count: int, *, row_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, size) of each; ends fall on rows and on pages."""
    unit = _unit(row_bytes)
    size = chunk_bytes // unit * unit
    if row_bytes < 1 or size < 1:
        raise BadInput(
            f"chunks of {format_bytes(chunk_bytes)} hold no whole rows of {row_bytes} bytes on "
            f"whole pages; at least {format_bytes(unit)}"
        )
    for at in range(0, byte_count, size):
        yield at, min(size, byte_count - at)


def _require_same_address(address: int) -> None:
    seen = int(call("cuMemHostGetDevicePointer", address, 0))
    if seen != address:
        raise Unavailable(
            f"the device sees host memory at {address:#x} under {seen:#x}: this system has no "
            "unified addresses"
        )


def _owner(memory: Bytes) -> Any:
    """What all views keep alive: the array over the mapping itself."""
    owner = memory
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return owner


def _unregister(device: Device, addresses: list[int]) -> None:
    device.wait_for_all()
    for address in addresses:
        attempt("cuMemHostUnregister", address)
        device.pinned.remove(address)
    addresses.clear()
