"""Host memory: aligned, zeroed, returned."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ess.errors import BadInput, Unavailable
from ess.kernels.memory import host_memory, map_memory_file, memory_file

LIBC = ctypes.CDLL(None, use_errno=True)
PAGE_BYTES = os.sysconf("SC_PAGESIZE")


def resident_bytes(begin: int, size: int) -> int:
    """Of these addresses. A mapping may have neighbours of the same kind, which the system joins
    with it, so only what lies between the addresses is asked for."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, stop = (int(bound, 16) for bound in line.split()[0].split("-"))
        first, stop = max(first, begin // PAGE_BYTES * PAGE_BYTES), min(stop, begin + size)
        if first < stop:
            pages = (ctypes.c_ubyte * -(-(stop - first) // PAGE_BYTES))()
            done = LIBC.mincore(ctypes.c_void_p(first), ctypes.c_size_t(stop - first), pages)
            assert done == 0, os.strerror(ctypes.get_errno())
            total += sum(page & 1 for page in bytes(pages)) * PAGE_BYTES
    return total


def place_of(memory: np.ndarray) -> tuple[int, int]:
    return memory.__array_interface__["data"][0], memory.size


def test_a_limit_that_the_user_has_set_is_named() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, before[1]))
    try:
        with pytest.raises(Unavailable) as failed:
            host_memory(1 << 40)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert str(failed.value).endswith("memory; `ulimit -v` allows this process 1.00 TiB")


@pytest.mark.parametrize("byte_count", [1, 4097, 2 << 20, (5 << 20) + 3])
def test_aligned_and_zeroed(byte_count: int) -> None:
    memory = host_memory(byte_count, touch_threads=2)
    assert memory.size == byte_count
    assert memory.__array_interface__["data"][0] % (2 << 20) == 0
    assert not memory.any()
    memory[-1] = 7
    assert memory[-1] == 7


def test_touched_in_advance_and_returned_when_dropped() -> None:
    memory = host_memory(64 << 20, touch_threads=3)
    place = place_of(memory)
    assert resident_bytes(*place) >= 64 << 20
    last_rows = memory.reshape(-1, 4096)[-2:]
    del memory
    assert not last_rows.any()
    del last_rows
    assert resident_bytes(*place) < 10 << 20


def test_untouched_memory_costs_nothing() -> None:
    memory = host_memory(1 << 32)
    assert resident_bytes(*place_of(memory)) < 10 << 20
    memory[1 << 31] = 1
    assert memory.dtype == np.uint8


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(BadInput, match="byte_count is 0"):
        host_memory(0)
    with pytest.raises(Unavailable, match="host memory"):
        host_memory(1 << 55)


SIZE = (3 << 20) + 17


def test_a_memory_file_is_zeroed_and_seen_through_every_map():
    made = memory_file(SIZE)
    assert not made.memory.any()
    made.memory[-1] = 7
    theirs = map_memory_file(os.getpid(), made.fd, SIZE)
    assert theirs[-1] == 7
    begin = 8192 + 5
    part = map_memory_file(os.getpid(), made.fd, 100, begin=begin)
    part[:] = 3
    assert (made.memory[begin : begin + 100] == 3).all()
    assert made.memory[begin - 1] == made.memory[begin + 100] == 0


def test_a_memory_file_does_not_shrink():
    made = memory_file(SIZE)
    with pytest.raises(PermissionError):
        os.ftruncate(made.fd, SIZE - 1)


def test_a_memory_file_is_closed_with_its_last_view():
    made = memory_file(SIZE)
    fd, rows = made.fd, made.memory[: 1 << 20].reshape(-1, 4096)
    del made
    os.fstat(fd)
    theirs = map_memory_file(os.getpid(), fd, SIZE)
    del rows
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    theirs[-1] = 1
    with pytest.raises(OSError, match="No such file"):
        map_memory_file(os.getpid(), fd, SIZE)


@pytest.mark.parametrize(
    ("size", "begin"), [(SIZE + 1, 0), (SIZE, 1), (0, 0), (8, -8), (1, 1 << 60)]
)
def test_only_what_is_in_the_file_is_mapped(size: int, begin: int):
    made = memory_file(SIZE)
    with pytest.raises(OSError, match=f"of a file of {SIZE}"):
        map_memory_file(os.getpid(), made.fd, size, begin=begin)


OWNER = """
import os, sys
from ess.kernels.memory import memory_file
made = memory_file(1 << 20)
made.memory[:] = 5
print(os.getpid(), made.fd, flush=True)
sys.stdin.read()
"""


def test_memory_of_a_killed_process_lives_as_long_as_it_is_mapped():
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        pid, fd = map(int, process.stdout.readline().split())
        theirs = map_memory_file(pid, fd, 1 << 20)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (theirs == 5).all()
    with pytest.raises(OSError, match="No such"):
        map_memory_file(pid, fd, 1 << 20)
