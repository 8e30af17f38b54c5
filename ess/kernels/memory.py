"""Host memory for pools: zeroed, on huge pages where the system has them.

Rows scattered over gigabytes miss the address translation caches on 4 KiB pages; on 2 MiB pages the
same gather runs about half as fast again.

Memory of one process is anonymous. Memory that other processes map is a memory file: it has no path
and no name in a file system, so it is gone when the last process that has it open or mapped has
ended, however that ended. Others open it through its owner's entry in /proc, which asks for the
same user and one process namespace. The file is sealed, it cannot shrink under those who map it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput, Unavailable
from ess.units import align_up, div_ceil, format_bytes

_HUGE_PAGE = 2 << 20


def host_memory(byte_count: int, *, touch_threads: int = 0) -> npt.NDArray[np.uint8]:
    """A 2 MiB-aligned array; the memory returns to the system when the last view is dropped.

    Pages arrive at first touch. With `touch_threads` they are all there when this returns.
    """
    _check_size(byte_count)
    try:
        region = mmap.mmap(
            -1, align_up(byte_count, _HUGE_PAGE) + _HUGE_PAGE, flags=mmap.MAP_PRIVATE
        )
    except OSError as error:
        raise Unavailable(
            f"{format_bytes(byte_count)} of host memory cannot be allocated: {_why(error)}"
        ) from error
    whole = _on_huge_pages(region)
    start = -whole.__array_interface__["data"][0] % _HUGE_PAGE
    memory = whole[start : start + byte_count]
    touch(memory, touch_threads)
    return memory


@dataclass(frozen=True, slots=True, eq=False)
class MemoryFile:
    """Memory that other processes can map. `fd` stays open while a view of `memory` lives."""

    memory: npt.NDArray[np.uint8]
    fd: int


def memory_file(byte_count: int, *, name: str = "memory") -> MemoryFile:
    """Fresh memory in a file; `name` is shown in /proc."""
    _check_size(byte_count)
    if not hasattr(os, "memfd_create"):
        raise Unavailable(
            "sharing memory between processes needs memory files, which only Linux has"
        )
    fd = os.memfd_create(f"ess-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, byte_count)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        region = mmap.mmap(fd, byte_count)
    except OSError as error:
        os.close(fd)
        raise Unavailable(
            f"{format_bytes(byte_count)} of shared memory cannot be allocated: {_why(error)}"
        ) from error
    weakref.finalize(region, os.close, fd)
    return MemoryFile(_on_huge_pages(region), fd)


def map_memory_file(
    pid: int, fd: int, byte_count: int, *, begin: int = 0, writes: bool = True
) -> npt.NDArray[np.uint8]:
    """`byte_count` bytes from `begin` on of a file that process `pid` has open. OSError where
    there is no such file, or no longer. Memory that the caller does not write to is mapped for
    reading: whatever writes there ends the process."""
    access = os.O_RDWR if writes else os.O_RDONLY
    opened = os.open(f"/proc/{pid}/fd/{fd}", access | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        file_bytes = os.fstat(opened).st_size
        if not 0 <= begin < begin + byte_count <= file_bytes:
            raise OSError(f"{byte_count} bytes at {begin} of a file of {file_bytes}")
        first = begin - begin % mmap.ALLOCATIONGRANULARITY
        region = mmap.mmap(
            opened,
            begin + byte_count - first,
            prot=mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0),
            offset=first,
        )
    finally:
        os.close(opened)
    whole = _on_huge_pages(region)
    return (whole if writes else np.asarray(_Read(whole)))[begin - first :]


class _Read:
    """Memory that is only read, under an array that does not know it: torch warns of one that
    does. It keeps the memory mapped."""

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self._memory = memory
        address = memory.__array_interface__["data"][0]
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": memory.shape,
            "data": (address, False),
        }


def _check_size(byte_count: int) -> None:
    if byte_count <= 0:
        raise BadInput(f"byte_count is {byte_count}, must be positive")


def _why(error: OSError) -> str:
    """Names a limit that the user has set: no figure of free memory shows it."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY or error.errno != errno.ENOMEM:
        return str(error.strerror)
    return f"{error.strerror}; `ulimit -v` allows this process {format_bytes(most)}"


def _on_huge_pages(region: mmap.mmap) -> npt.NDArray[np.uint8]:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, np.uint8)


def touch(memory: npt.NDArray[np.uint8], threads: int) -> None:
    """Every page of fresh memory arrives now; none with 0 threads."""
    if threads <= 0:
        return
    share = align_up(div_ceil(memory.size, threads), _HUGE_PAGE)
    parts = [memory[at : at + share] for at in range(0, memory.size, share)]
    with ThreadPoolExecutor(threads) as pool:
        for touched in [pool.submit(part[:: mmap.PAGESIZE].fill, 0) for part in parts]:
            touched.result()
