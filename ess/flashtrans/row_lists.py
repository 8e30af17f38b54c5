"""Row numbers sent to a device: a ring of pinned memory and its copy on the device."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from ess.kernels.cuda.driver import Device, call
from ess.kernels.cuda.memory import DeviceMemory
from ess.kernels.cuda.pinned import pinned_memory
from ess.kernels.cuda.streams import CudaEvent


class RowLists:
    """Every list takes the next stretch of the ring. `seal` names the event after which the device
    no longer reads the stretches put since the last `seal`.

    When the ring is full, `put` waits for the events of the oldest stretches. A caller seals before
    it has put more than half of `capacity`; so `put` never needs a stretch that has no event yet.
    """

    def __init__(self, device: Device, *, capacity: int) -> None:
        assert capacity >= 4, f"a ring of {capacity} numbers"
        self.capacity = capacity
        self._host = pinned_memory(device, 4 * capacity, touch_threads=1).view(np.int32)
        self._twin = DeviceMemory(device, 4 * capacity)
        self._cursor = 0
        self._unsealed: list[tuple[int, int]] = []
        self._sealed: deque[tuple[int, int, CudaEvent]] = deque()

    @property
    def piece_max(self) -> int:
        """The longest list. Two of this length always fit between two seals, even when a list does
        not fit behind the cursor and the end of the ring is skipped."""
        return self.capacity // 4

    def put(self, numbers: npt.NDArray[Any], stream: int) -> int:
        """Queues the copy of a list on the stream and returns its address on the device."""
        count = len(numbers)
        assert 0 < count <= self.piece_max, f"{count} numbers in a ring of {self.capacity}"
        start = self._cursor if self._cursor + count <= self.capacity else 0
        assert start + count <= self.capacity, f"{start}+{count} in a ring of {self.capacity}"
        self._free(start, start + count)
        self._host[start : start + count] = numbers
        address = self._twin.address + 4 * start
        source = int(self._host.__array_interface__["data"][0]) + 4 * start
        call("cuMemcpyHtoDAsync", address, source, 4 * count, stream)
        self._unsealed.append((start, start + count))
        self._cursor = start + count
        assert address % 4 == 0, f"a list at {address:#x}, not at a word"
        return address

    def seal(self, event: CudaEvent) -> None:
        taken = sum(end - start for start, end in self._unsealed)
        assert taken <= self.capacity // 2, f"{taken} numbers without a seal, of {self.capacity}"
        self._sealed += [(start, end, event) for start, end in self._unsealed]
        self._unsealed.clear()

    def check(self) -> None:
        stretches = [(start, end) for start, end, _ in self._sealed] + self._unsealed
        assert 0 <= self._cursor <= self.capacity, f"the cursor is at {self._cursor}"
        for start, end in stretches:
            assert 0 <= start < end <= self.capacity, f"a list at {start}..{end}"
        ordered = sorted(stretches)
        for (_, end), (start, _) in itertools.pairwise(ordered):
            assert end <= start, f"two lists share {start}..{end} of the ring"
        if stretches:
            assert stretches[-1][1] == self._cursor, "the next list would not follow the latest"

    def _free(self, start: int, end: int) -> None:
        for taken, until in self._unsealed:
            assert end <= taken or until <= start, "two lists of a call overlap in the ring"
        while any(start < until and taken < end for taken, until, _ in self._sealed):
            *_, event = self._sealed.popleft()
            event.wait()
            assert event.done(), "a stretch is taken again while the device may read it"
