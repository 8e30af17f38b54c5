"""Host memory from which pages are sent: vLLM's tensors may change, or lie on a device."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ess.errors import BadInput
from ess.transfer.runs import Region, Runs, page_runs

REGION: Final = 1


class Staging:
    """Slots of one size. The caller that takes slots gives them back when their transfer ends."""

    def __init__(self, *, slot_bytes: int, slot_count: int) -> None:
        if slot_bytes <= 0 or slot_count <= 0:
            raise BadInput(f"staging_pages is {slot_count}, must be positive")
        self._slot_bytes = slot_bytes
        is_pinned = torch.cuda.is_available()
        self._memory = torch.zeros(
            (slot_count, slot_bytes), dtype=torch.uint8, pin_memory=is_pinned
        )
        self._free = list(range(slot_count - 1, -1, -1))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def region(self) -> Region:
        return Region(REGION, self._memory.numpy().reshape(-1))

    def put(self, pages: Tensor) -> NDArray[np.int64]:
        """Copies pages into slots, neighbours if possible, and returns the slots."""
        count, size = pages.shape
        assert count <= len(self._free), f"{count} pages for {len(self._free)} slots"
        assert size <= self._slot_bytes, f"a page of {size} bytes in a slot of {self._slot_bytes}"
        slots = sorted(self._free.pop() for _ in range(count))
        self._memory[slots, :size] = pages
        return np.array(slots, np.int64)

    def runs(self, slots: NDArray[np.int64], size: int) -> Runs:
        runs = page_runs(REGION, slots, page_bytes=self._slot_bytes)
        runs[:, 2] = size
        return runs

    def give_back(self, runs: Runs) -> None:
        returned = (runs[:, 1] // self._slot_bytes).tolist()
        assert not set(returned) & set(self._free), f"slots {returned} were given back twice"
        self._free.extend(reversed(returned))
