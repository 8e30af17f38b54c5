"""Row numbers on their way to a device: a ring of pinned memory and its twin over there."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from ess.kernels.cuda.driver import Device, call
from ess.kernels.cuda.memory import DeviceMemory
from ess.kernels.cuda.pinned import pinned_memory
from ess.kernels.cuda.streams import CudaEvent


class RowLists:
    """A list takes the next free stretch; `seal` says which event frees what was put since.

    When the ring is full, `put` waits for the oldest stretch. So a caller seals before it puts
    more than half of `capacity`, and then no stretch waits for itself.
    """

    def __init__(self, device: Device, *, capacity: int = 1 << 20) -> None:
        assert capacity >= 4, f"a ring of {capacity} numbers"
        self.capacity = capacity
        self._host = pinned_memory(device, 4 * capacity, touch_threads=1).view(np.int32)
        self._twin = DeviceMemory(device, 4 * capacity)
        self._cursor = 0
        self._unsealed: list[tuple[int, int]] = []
        self._sealed: deque[tuple[int, int, CudaEvent]] = deque()

    @property
    def piece_max(self) -> int:
        """Two lists of so many numbers, and what a wrap skips, always find room."""
        return self.capacity // 4

    def put(self, numbers: npt.NDArray[Any], stream: int) -> int:
        """Queues the copy of a list on the stream; the address that it will have over there."""
        count = len(numbers)
        assert count <= self.piece_max, f"{count} numbers in a ring of {self.capacity}"
        start = self._cursor if self._cursor + count <= self.capacity else 0
        self._free(start, start + count)
        self._host[start : start + count] = numbers
        address = self._twin.address + 4 * start
        here = int(self._host.__array_interface__["data"][0]) + 4 * start
        call("cuMemcpyHtoDAsync", address, here, 4 * count, stream)
        self._unsealed.append((start, start + count))
        self._cursor = start + count
        return address

    def seal(self, event: CudaEvent) -> None:
        self._sealed += [(start, end, event) for start, end in self._unsealed]
        self._unsealed.clear()

    def _free(self, start: int, end: int) -> None:
        for taken, until in self._unsealed:
            assert end <= taken or until <= start, "a list waits for one of its own call"
        while any(start < until and taken < end for taken, until, _ in self._sealed):
            *_, event = self._sealed.popleft()
            event.wait()
