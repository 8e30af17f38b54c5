"""Registered memory from which windows leave: a few places, taken while a transfer reads them."""

from __future__ import annotations

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

    @property
    def has_room(self) -> bool:
        return bool(self._free)

    def put(self, content: bytes) -> tuple[int, Runs]:
        """The place that is taken now, and where the content lies."""
        size, place = len(content), self._free.pop()
        assert size <= self._place_bytes, f"{size} bytes for a place of {self._place_bytes}"
        begin = place * self._place_bytes
        self.region.memory[begin : begin + size] = np.frombuffer(content, np.uint8)
        return place, np.array([[geometry.PACKED, begin, size]], np.int64)

    def free(self, place: int) -> None:
        assert 0 <= place < PLACES, f"place {place} of {PLACES}"
        self._free.append(place)

    def check(self, taken: list[int]) -> None:
        assert sorted([*taken, *self._free]) == list(range(PLACES)), "a place is lost"
