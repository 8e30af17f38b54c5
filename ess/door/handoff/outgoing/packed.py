"""Registered memory from which windows and parts of states leave: a few places, taken while a
transfer reads them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from ess.door.handoff import geometry
from ess.transfer.runs import Region, Runs

PLACES: Final = 4


class Packed:
    def __init__(self, place_bytes: int) -> None:
        self._place_bytes = place_bytes
        self._free = list(range(PLACES))
        self.region = Region(geometry.PACKED, np.zeros(PLACES * place_bytes, np.uint8))

    def lend(self, content: memoryview) -> Runs | None:
        """Where a copy of it lies until it is given back; None if every place is taken."""
        if not self._free:
            return None
        packed = np.frombuffer(content, np.uint8)
        size, begin = len(packed), self._free.pop() * self._place_bytes
        assert size <= self._place_bytes, f"{size} bytes for a place of {self._place_bytes}"
        self.region.memory[begin : begin + size] = packed
        return np.array([[geometry.PACKED, begin, size]], np.int64)

    def give_back(self, local: Runs) -> None:
        self._free.append(self._place_of(local))

    def check(self, lent: Iterable[Runs]) -> None:
        places = [*map(self._place_of, lent), *self._free]
        assert sorted(places) == list(range(PLACES)), "a place is lost"

    def _place_of(self, local: Runs) -> int:
        return int(local[0, 1]) // self._place_bytes
