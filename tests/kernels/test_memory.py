"""Host memory: aligned, zeroed, returned."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from ess.errors import BadInput, Unavailable
from ess.kernels.memory import host_memory


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    match = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) << 10


@pytest.mark.parametrize("byte_count", [1, 4097, 2 << 20, (5 << 20) + 3])
def test_aligned_and_zeroed(byte_count: int) -> None:
    memory = host_memory(byte_count, touch_threads=2)
    assert memory.size == byte_count
    assert memory.__array_interface__["data"][0] % (2 << 20) == 0
    assert not memory.any()
    memory[-1] = 7
    assert memory[-1] == 7


def test_touched_in_advance_and_returned_when_dropped() -> None:
    before = resident_bytes()
    memory = host_memory(64 << 20, touch_threads=3)
    assert resident_bytes() - before > 60 << 20
    last_rows = memory.reshape(-1, 4096)[-2:]
    del memory
    assert not last_rows.any()
    del last_rows
    assert resident_bytes() - before < 10 << 20


def test_untouched_memory_costs_nothing() -> None:
    before = resident_bytes()
    memory = host_memory(1 << 32)
    assert resident_bytes() - before < 10 << 20
    memory[1 << 31] = 1
    assert memory.dtype == np.uint8


def test_bad_sizes() -> None:
    with pytest.raises(BadInput, match="byte_count is 0"):
        host_memory(0)
    with pytest.raises(Unavailable, match="host memory"):
        host_memory(1 << 55)
