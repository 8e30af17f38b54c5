"""Files that are read again while a server runs: keys and certificates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ess import console
from ess.errors import BadInput

FILES_S: Final = 10


class Watched:
    """Files that are read again when they have changed. `use` reads them and returns what is true
    from then on. Files that it refuses are not used, as when only the first of two files has
    changed so far."""

    def __init__(self, what: str, paths: Sequence[str], use: Callable[[], str]) -> None:
        self._what = what
        self._paths = paths
        self._use = use
        self._seen = self._stamps()

    def refresh(self) -> bool:
        """Whether they have changed, and are used."""
        stamps = self._stamps()
        if stamps == self._seen:
            return False
        self._seen = stamps
        try:
            console.note(f"ess: {self._what} has changed: {self._use()}")
        except (BadInput, OSError) as error:
            console.note(f"ess: {self._what} has changed and is not used: {error}")
            return False
        return True

    def _stamps(self) -> list[tuple[int, int, int] | None]:
        """When each file was written, its size, and which file it is; None for a missing one. The
        size tells two writes apart that share a tick of the file system's clock."""
        stamps: list[tuple[int, int, int] | None] = []
        for path in map(Path, self._paths):
            try:
                status = path.stat()
            except OSError:
                stamps.append(None)
            else:
                stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return stamps
