"""Pages whose bytes follow from their hash, so that a reader knows what they must be."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ess.pool.disk.slab import ALIGN
from ess.pool.disk.tier import DiskTier
from ess.pool.disk.writer import Copy, Note, unsaid

PAGE_BYTES = 3 * ALIGN + 100
IDENTITY = b"these tests"


def content(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def page_of(text: bytes) -> npt.NDArray[np.uint8]:
    drawn = np.random.default_rng(np.frombuffer(text, np.uint32))
    return drawn.integers(0, 256, PAGE_BYTES, dtype=np.uint8)


def copies(text: bytes) -> Copy:
    def copy(out: npt.NDArray[np.uint8]) -> bool:
        out[:] = page_of(text)
        return True

    return copy


def tier(
    folder: Path, *, pages: int = 24, identity: bytes = IDENTITY, note: Note = unsaid
) -> DiskTier:
    capacity = pages * (PAGE_BYTES + -PAGE_BYTES % ALIGN)
    return DiskTier(
        folder, identity=identity, page_bytes=PAGE_BYTES, capacity_bytes=capacity, note=note
    )


def texts(numbers: range) -> list[bytes]:
    return [content(number) for number in numbers]


def fill(made: DiskTier, numbers: range) -> None:
    for number in numbers:
        made.store(content(number), copies(content(number)))
    made.flush()


def loaded(made: DiskTier, text: bytes) -> bool:
    """Whether the page is there; AssertionError where it comes and is not what was stored."""
    page = np.zeros(PAGE_BYTES, np.uint8)
    parts = [page[:5], page[5:9000], page[9000:]]
    if not made.load(text, parts):
        return False
    assert (page == page_of(text)).all(), f"a wrong page of {text.hex()}"
    return True
