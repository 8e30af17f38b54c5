"""The folder of a disk tier: its files, its lock, and when it starts empty."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from ess.errors import BadState, Unavailable, reason_of
from ess.pool.disk.catalogue import Catalogue, Entry, Unreadable, Unusable
from ess.pool.disk.slab import Slab

LOCK: Final = "lock"
SLAB: Final = "pages.slab"
CATALOGUE: Final = "pages.sqlite"
SUFFIXES: Final = ("", "-wal", "-shm", "-journal")


class DiskFolder:
    """An open folder; `opened` says in a sentence why a folder that had pages starts empty."""

    def __init__(self, path: Path, *, identity: bytes, page_bytes: int, record_max: int) -> None:
        self.opened = ""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _locked(path)
        except OSError as error:
            raise Unavailable(f"{path} cannot keep pages: {error.strerror}") from error
        try:
            self._open(path, identity, page_bytes, record_max)
        except (OSError, Unreadable, Unusable) as error:
            os.close(self._lock)
            raise Unavailable(f"{path} cannot keep pages: {reason_of(error)}") from error

    def _open(self, path: Path, identity: bytes, page_bytes: int, record_max: int) -> None:
        self.slab = Slab(path / SLAB, record_bytes=page_bytes)
        try:
            self.catalogue, self.entries = self._open_catalogue(path, identity, record_max)
        except (OSError, Unreadable, Unusable):
            self.slab.close()
            raise

    def _open_catalogue(
        self, path: Path, identity: bytes, record_max: int
    ) -> tuple[Catalogue, list[Entry]]:
        """Drops entries whose records the slab has lost, and cuts off bytes behind the last record
        or of no catalogue."""
        if (path / CATALOGUE).exists():
            try:
                return self._read_catalogue(path, identity, record_max)
            except Unusable as why:
                self.opened = f"{path} starts empty: {why}"
        for suffix in SUFFIXES:
            (path / f"{CATALOGUE}{suffix}").unlink(missing_ok=True)
        return self._read_catalogue(path, identity, 0)

    def _read_catalogue(
        self, path: Path, identity: bytes, record_max: int
    ) -> tuple[Catalogue, list[Entry]]:
        self.slab.keep(record_max)
        catalogue = Catalogue(
            path / CATALOGUE, identity=identity, page_bytes=self.slab.record_bytes
        )
        try:
            return catalogue, catalogue.entries(self.slab.record_count)
        except (Unreadable, Unusable):
            catalogue.close()
            raise

    def close(self) -> None:
        self.catalogue.close()
        self.slab.close()
        os.close(self._lock)


def _locked(path: Path) -> int:
    """Opens and locks a file for this process, until the process ends, however it ends."""
    held = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(held, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(held)
        raise BadState(
            f"{path} is in use by process {holder}: every engine needs a folder of its own"
        ) from error
    except OSError:
        os.close(held)
        raise
    with suppress(OSError):  # a full disk may have no room even for the number
        os.ftruncate(held, 0)
        os.pwrite(held, str(os.getpid()).encode(), 0)
    return held
