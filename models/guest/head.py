"""Checks the head of a GGUF file before the library reads it, so that no count in it is trusted.

The library makes objects for every value that a list announces, whether or not it is there: a file
of a hundred bytes would take all memory. Here each count is compared with a bound, and each length
with the bytes that are left.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ess.errors import BadInput

VERSIONS: Final = (2, 3)
ENTRIES_MAX: Final = 1 << 12
TENSORS_MAX: Final = 1 << 14
LISTED_MAX: Final = 1 << 20
"""Values in all lists of a file."""
SIDES_MAX: Final = 4
WIDTHS: Final[Mapping[int, int]] = MappingProxyType(
    {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
)
"""Bytes of a plain value, by the number of its kind."""
TEXT, LIST = 8, 9


def check_head(path: Path) -> None:
    """BadInput unless everything before the tensors' data is there, and of a sensible size."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        _Walk(path.name, held).whole()


class _Walk:
    def __init__(self, name: str, held: mmap.mmap) -> None:
        self._name, self._held, self._at, self._listed = name, held, 0, 0

    def whole(self) -> None:
        magic, version = self._held[:4], self._number("<4xI")
        if magic != b"GGUF" or version not in VERSIONS:
            raise self._refusal(f"begins with {magic!r} and version {version}")
        tensors = self._count("tensors", TENSORS_MAX)
        for _ in range(self._count("entries", ENTRIES_MAX)):
            self._text()
            self._value(self._number("<I"))
        for _ in range(tensors):
            self._tensor()

    def _tensor(self) -> None:
        """Name, sides, kind and offset."""
        self._text()
        sides = self._number("<I")
        if sides > SIDES_MAX:
            raise self._refusal(f"has a tensor of {sides:,} sides, at most {SIDES_MAX}")
        self._skip(8 * sides + 4 + 8)

    def _value(self, kind: int) -> None:
        if kind == LIST:
            self._list()
        elif kind == TEXT:
            self._text()
        else:
            self._skip(self._width(kind))

    def _list(self) -> None:
        kind, count = self._number("<I"), self._count("listed values", LISTED_MAX - self._listed)
        self._listed += count
        if kind != TEXT:
            self._skip(count * self._width(kind))
            return
        for _ in range(count):
            self._text()

    def _text(self) -> None:
        self._skip(self._number("<Q"))

    def _width(self, kind: int) -> int:
        if kind not in WIDTHS:
            raise self._refusal(f"has a value of kind {kind} at byte {self._at:,}")
        return WIDTHS[kind]

    def _count(self, what: str, most: int) -> int:
        count = self._number("<Q")
        if count > most:
            raise self._refusal(
                f"announces {count:,} {what} at byte {self._at:,}, at most {most:,}"
            )
        return count

    def _number(self, form: str) -> int:
        at = self._at
        self._skip(struct.calcsize(form))
        return int(struct.unpack_from(form, self._held, at)[0])

    def _skip(self, count: int) -> None:
        if count > len(self._held) - self._at:
            raise self._refusal(
                f"ends early: {count:,} bytes from byte {self._at:,} on are missing"
            )
        self._at += count

    def _refusal(self, what: str) -> BadInput:
        return BadInput(f"{self._name} {what}")
