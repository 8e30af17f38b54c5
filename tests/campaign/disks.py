"""A disk tier in the caller's thread: written and read when its turn comes, and badly if told."""

from __future__ import annotations

import errno
import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from ess.array_types import Bytes
from ess.pool.disk.folder import CATALOGUE, SLAB
from ess.pool.disk.slab import ALIGN, Parts
from ess.pool.disk.tier import DiskTier
from ess.pool.disk.writer import Copy

WRITES: Final = ("disk full", "torn write", "lost write", "stray write")
READS: Final = ("failed read", "short read", "rotten read")
CATALOGUES: Final = ("catalogue fails",)
DISK_FAULTS: Final = (*WRITES, *READS, *CATALOGUES)
DAMAGES: Final = ("slab cut", "slab noise", "catalogue noise", "log lost")
"""What a folder may have gone through between two processes."""


class ManualDisk(DiskTier):
    """`odds` are chances per write, read and transaction; `struck` counts those that came."""

    def __init__(
        self,
        folder: Path,
        *,
        page_bytes: int,
        page_max: int,
        odds: Mapping[str, float],
        delay_max: int,
        seed: int,
        struck: Counter[str],
    ) -> None:
        stride = page_bytes + -page_bytes % ALIGN
        super().__init__(
            folder, identity=b"campaign", page_bytes=page_bytes, capacity_bytes=page_max * stride
        )
        self.draw = random.Random(seed)
        self._odds, self._delay_max, self._struck = odds, delay_max, struck
        self._ticks = 0
        self._late: list[tuple[int, bytes, Copy]] = []
        self._loadings: list[LateLoading] = []
        slab, catalogue = self._folder.slab, self._folder.catalogue
        self._write_well, slab.write = slab.write, self._write
        self._read_well, slab.read = slab.read, self._read
        self._change_well, catalogue.change = catalogue.change, self._change

    # ---- when

    def due(self) -> int:
        return self._ticks + self.draw.randint(0, self._delay_max)

    def store(self, content: bytes, copy: Copy) -> None:
        self._late.append((self.due(), content, copy))

    def lose(self, contents: Iterable[bytes]) -> None:
        lost = {*contents}
        self._late = [each for each in self._late if each[1] not in lost]
        super().lose(lost)

    def forget(self) -> int:
        count = super().forget()
        self._late.clear()
        return count

    def loading(self, contents: Sequence[bytes], parts_of: Callable[[int], Parts]) -> LateLoading:
        self._loadings.append(LateLoading(self, contents, parts_of))
        return self._loadings[-1]

    def advance(self) -> None:
        """A turn: what is due is written as one batch, and read."""
        self._ticks += 1
        due = [each for each in self._late if each[0] <= self._ticks]
        self._late = [each for each in self._late if each[0] > self._ticks]
        with self._lock:
            for _, content, copy in due:
                super().store(content, copy)
        self.flush()
        for loading in self._loadings:
            if loading.due <= self._ticks:
                loading.wait()
        self._loadings = [loading for loading in self._loadings if not loading.is_done]

    def kill(self) -> None:
        """The process is gone, with all that it had not written."""
        self._late.clear()
        self._writer.end()
        self._readers.shutdown()
        self._folder.close()

    # ---- how badly

    def _drawn(self, faults: Sequence[str]) -> str:
        for fault in faults:
            if self.draw.random() < self._odds.get(fault, 0.0):
                self._struck[fault] += 1
                return fault
        return ""

    def _write(self, record: int, page: Bytes) -> None:
        match self._drawn(WRITES):
            case "disk full":
                raise OSError(errno.ENOSPC, "no space is left")
            case "torn write":
                torn = page.copy()
                torn[self.draw.randrange(len(page)) :] = 0xEE
                self._write_well(record, torn)
            case "stray write":
                self._write_well((record + 1) % self._records.record_max, page)
            case "":
                self._write_well(record, page)

    def _read(self, record: int, parts: Parts) -> bool:
        fault = self._drawn(READS)
        if fault == "failed read":
            raise OSError(errno.EIO, "it cannot be read")
        is_read = self._read_well(record, parts)
        if fault == "rotten read":
            part = parts[self.draw.randrange(len(parts))].reshape(-1)
            part[self.draw.randrange(len(part))] ^= 1 << self.draw.randrange(8)
        return is_read and fault != "short read"

    def _change(self, **changes: object) -> None:
        if any(changes.values()) and self._drawn(CATALOGUES):
            raise sqlite3.OperationalError("disk I/O error")
        self._change_well(**changes)


class LateLoading:
    """Reads all of it at once, when it is due or waited for."""

    def __init__(
        self, disk: ManualDisk, contents: Sequence[bytes], parts_of: Callable[[int], Parts]
    ) -> None:
        self.due = disk.due()
        self.is_done = False
        self.count = 0
        self._disk, self._contents, self._parts_of = disk, contents, parts_of

    def begin(self) -> None:
        """Its turn comes later."""

    def wait(self) -> None:
        self._read(len(self._contents))

    def cancel(self) -> None:
        """Some pages a reader had begun."""
        self._read(self._disk.draw.randint(0, len(self._contents)))

    def _read(self, most: int) -> None:
        if self.is_done:
            return
        self.is_done = True
        good = [
            self._disk.load(content, self._parts_of(place))
            for place, content in enumerate(self._contents[:most])
        ]
        self.count = good.index(False) if False in good else len(good)
        self._disk.flush()


def damage(folder: Path, draw: random.Random, struck: Counter[str]) -> None:
    """Half of the folders come through well."""
    if draw.random() < 0.5:
        return
    kind = draw.choice(DAMAGES)
    path = folder / (SLAB if kind.startswith("slab") else CATALOGUE)
    size = path.stat().st_size
    if kind == "log lost":
        path.with_name(f"{CATALOGUE}-wal").unlink(missing_ok=True)
    elif kind == "slab cut":
        with path.open("r+b") as file:
            file.truncate(draw.randint(0, size))
    elif size:
        with path.open("r+b") as file:
            for _ in range(draw.randint(1, 5)):
                file.seek(draw.randrange(size))
                file.write(draw.randbytes(draw.randint(1, 64)))
    struck[kind] += 1
