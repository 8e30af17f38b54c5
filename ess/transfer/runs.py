"""Memory that transfers use: regions of registered memory, and runs of bytes in them.

A run is (region, offset, bytes). Lists of runs are int64 arrays [n, 3], so page tables become runs
without a loop. Two lists match run by run; neighbours on both sides are merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ess.errors import BadInput

Runs = NDArray[np.int64]
RUNS_MAX: Final = 1 << 14
RUN_BYTES: Final = 24
REGION_NUMBER_MAX: Final = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Numbered memory that peers may read and write. If it lies in one of our memory files, `fd` is
    that file, and the memory starts at its byte `begin`."""

    number: int
    memory: NDArray[np.uint8]
    fd: int | None = None
    begin: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.number < REGION_NUMBER_MAX:
            raise BadInput(f"region number {self.number} is outside 0..{REGION_NUMBER_MAX - 1}")
        if self.memory.ndim != 1 or not self.memory.flags.c_contiguous:
            raise BadInput(f"region {self.number} is not one contiguous run of bytes")

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)


def no_runs() -> Runs:
    return np.empty((0, 3), np.int64)


def page_runs(region: int, pages: NDArray[np.int64], *, page_bytes: int) -> Runs:
    """A run per page; page p lies at `p * page_bytes` of the region."""
    runs = np.empty((len(pages), 3), np.int64)
    runs[:, 0], runs[:, 1], runs[:, 2] = region, pages * page_bytes, page_bytes
    return runs


def merged(local: Runs, remote: Runs) -> tuple[Runs, Runs]:
    """The same bytes in as few runs as both sides allow."""
    if not len(local):
        return local, remote
    joins = _joins(local) & _joins(remote)
    heads = np.flatnonzero(np.concatenate(([True], ~joins)))
    sizes = np.add.reduceat(local[:, 2], heads)
    return _with_sizes(local[heads], sizes), _with_sizes(remote[heads], sizes)


def byte_count(runs: Runs) -> int:
    return int(runs[:, 2].sum())


def fault_of(runs: Runs, sizes: Mapping[int, int]) -> str | None:
    """What is wrong with runs in regions of these sizes, or None. Trusts no number in `runs`."""
    if not len(runs):
        return None
    numbers = runs[:, 0].tolist()
    unknown = set(numbers) - sizes.keys()
    if unknown:
        return f"region {min(unknown)} is not registered"
    room = np.array([sizes[number] for number in numbers], np.int64)
    offsets, counts = runs[:, 1], runs[:, 2]
    wrong = (offsets < 0) | (counts <= 0) | (counts > room)
    wrong |= offsets > room - np.where(wrong, 0, counts)
    if not wrong.any():
        return None
    number, offset, count = runs[wrong][0].tolist()
    return f"{count} bytes at {offset} are outside region {number} of {sizes[number]} bytes"


def views(runs: Runs, regions: Mapping[int, Region]) -> list[memoryview]:
    """Memory of checked runs, in order."""
    memory = {number: regions[number].memory.data for number in set(runs[:, 0].tolist())}
    return [memory[number][offset : offset + count] for number, offset, count in runs.tolist()]


def _joins(runs: Runs) -> NDArray[np.bool_]:
    """Whether a run ends where the next begins."""
    same = runs[1:, 0] == runs[:-1, 0]
    joins: NDArray[np.bool_] = same & (runs[1:, 1] == runs[:-1, 1] + runs[:-1, 2])
    return joins


def _with_sizes(runs: Runs, sizes: NDArray[np.int64]) -> Runs:
    runs = runs.copy()
    runs[:, 2] = sizes
    return runs
