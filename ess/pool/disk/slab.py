"""One file of equal records, each the bytes of a page: read and written in whole records.

This module does not know what a record holds or whether it is whole: the catalogue says where a
text lies, and the record's checksum whether it does lie there. The checksum begins with the text's
hash, so that a whole record of another text is refused like a torn one.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ess.array_types import Bytes
from ess.units import align_up

Parts = Sequence[Bytes]
"""The places in memory that take a record's bytes, in order."""

ALIGN: Final = 4096
PARTS_MAX: Final = 512
"""Parts in one call to the kernel, which takes 1,024 at most."""


def checksum(content: bytes, parts: Parts) -> int:
    """CRC-32 over the text's hash, then the record's bytes."""
    value = zlib.crc32(content)
    for part in parts:
        value = zlib.crc32(part.data, value)
    return value


class Slab:
    def __init__(self, path: Path, *, record_bytes: int) -> None:
        assert record_bytes > 0, f"records of {record_bytes} bytes"
        self.record_bytes = record_bytes
        self.stride = align_up(record_bytes, ALIGN)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, record: int, page: Bytes) -> None:
        """Writes the whole record; after an OSError its content is unknown."""
        assert page.nbytes == self.record_bytes, f"{page.nbytes} bytes of {self.record_bytes}"
        left, at = page.data, record * self.stride
        while left:
            count = os.pwrite(self._file, left, at)
            if count <= 0:
                raise OSError(errno.EIO, "nothing was written")
            left, at = left[count:], at + count

    def read(self, record: int, parts: Parts) -> bool:
        """Reads the record into `parts`; False where the file does not hold all of it."""
        assert sum(part.nbytes for part in parts) == self.record_bytes, "other than one record"
        left, at = [part.data.cast("B") for part in parts], record * self.stride
        while left:
            count = os.preadv(self._file, left[:PARTS_MAX], at)
            if count <= 0:
                return False
            at += count
            left = _behind(left, count)
        return True

    def sync(self) -> None:
        """Returns when everything written is on the disk. OSError if the file was removed: it would
        go on taking space, and no later process could find it."""
        os.fdatasync(self._file)
        if not os.fstat(self._file).st_nlink:
            raise OSError(errno.ENOENT, "its file was removed")

    @property
    def record_count(self) -> int:
        """How many records the file holds whole."""
        size = os.fstat(self._file).st_size
        return (size + self.stride - self.record_bytes) // self.stride

    def keep(self, record_count: int) -> None:
        """Cuts off all records behind the first `record_count`."""
        if os.fstat(self._file).st_size > record_count * self.stride:
            os.ftruncate(self._file, record_count * self.stride)

    def close(self) -> None:
        os.close(self._file)


def _behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """The parts that remain when the first `count` bytes are done."""
    at = 0
    while at < len(parts) and count >= len(parts[at]):
        count -= len(parts[at])
        at += 1
    rest = parts[at:]
    return [rest[0][count:], *rest[1:]] if count else rest
