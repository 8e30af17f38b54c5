"""In place of a disk tier, where processes share a host pool: one of them has the tier, which reads
pages into the pool and stores them from there. The others only mark what has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from ess.pool.disk.slab import Parts
from ess.pool.disk.tier import READ_MAX, Claim, Loading
from ess.pool.disk.use import DiskUse
from ess.pool.disk.writer import Copy


class Elsewhere:
    """Says of every page that it has it, and that it has read it: how many pages count, all
    processes agree."""

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.uses = DiskUse(page_bytes=page_bytes)

    def leading_count(self, contents: Sequence[bytes]) -> int:
        return len(contents)

    def claim(self, contents: Sequence[bytes]) -> Claim:
        return Claim(self, tuple(contents))

    def use(self, contents: Iterable[bytes]) -> None:
        return

    def release(self, contents: Iterable[bytes]) -> None:
        return

    def loading(self, contents: Sequence[bytes], parts_of: Callable[[int], Parts]) -> Loading:
        jobs = [
            partial(min, READ_MAX, len(contents) - first)
            for first in range(0, len(contents), READ_MAX)
        ]
        return Loading(_at_once, jobs)

    def store(self, content: bytes, copy: Copy) -> None:
        return

    def lose(self, contents: Iterable[bytes]) -> None:
        return

    def flush(self, timeout_s: float | None = None) -> bool:
        return True

    def forget(self) -> int:
        return 0

    def check(self) -> None:
        return

    def close(self) -> None:
        return


def _at_once(fulfil: Callable[..., None], run: Future[int], load: Callable[[], int]) -> None:
    fulfil(run, load)
