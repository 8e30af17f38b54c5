"""A folder for the sockets of server and engine, private to this user, removed at the end.

A killed server cannot remove its folder. So each holds a lock on a file in its own, which the
system releases with the process, and the next server removes folders without a held lock. A folder
gets its lock under another name first: between creating the file and locking it, another server
would take the folder for a dead one's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PREFIX: Final = "ess-"
LOCK: Final = "server.lock"


@contextlib.contextmanager
def own_folder() -> Iterator[str]:
    """Made by mkdtemp: other users cannot look into it."""
    remove_dead(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    fresh = folder / "fresh.lock"
    held = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        fresh.rename(folder / LOCK)
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def remove_dead(parent: Path) -> None:
    """Removes dead folders of this user, but no links; what cannot be removed stays."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.getuid() and not folder.is_symlink():
                _remove_if_dead(folder)


def _remove_if_dead(folder: Path) -> None:
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)
