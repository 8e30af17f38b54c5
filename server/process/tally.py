"""The server's own counts: answers, refusals, and how long clients waited.

Each of the server's processes counts by itself and writes its counts into a file that the others
read: any of them can answer for all. A process that replaces a lost one writes a new file, so no
count ever falls.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from ess.decoding import UNDECODABLE

WAIT_BOUNDS_S: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)


@dataclass(slots=True, eq=False)
class Waits:
    """A histogram of seconds: `counts[i]` waits took up to `WAIT_BOUNDS_S[i]`, the last longer."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(WAIT_BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, wait_s: float, count: int = 1) -> None:
        self.counts[bisect.bisect_left(WAIT_BOUNDS_S, wait_s)] += count
        self.total_s += wait_s * count

    def include(self, other: Waits) -> None:
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.total_s += other.total_s

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean_s(self) -> float:
        return self.total_s / self.count if self.count else 0.0


@dataclass(slots=True, eq=False)
class Tally:
    """`connection_count` and `document_count` are present numbers, the latter of choices that have
    ended and whose document is still to be made. All else counts since the start."""

    answers: dict[tuple[str, int], int] = field(default_factory=Counter)
    refusals: dict[str, int] = field(default_factory=Counter)
    finishes: dict[str, int] = field(default_factory=Counter)
    disconnect_count: int = 0
    connection_count: int = 0
    document_count: int = 0
    first_token: Waits = field(default_factory=Waits)
    between_tokens: Waits = field(default_factory=Waits)
    whole: Waits = field(default_factory=Waits)
    to_socket: Waits = field(default_factory=Waits)

    @contextmanager
    def due_documents(self, count: int = 1) -> Iterator[None]:
        """Counts documents until they are made, or are not wanted any more."""
        self.document_count += count
        try:
            yield
        finally:
            self.document_count -= count

    def include(self, other: Tally) -> None:
        for name in ("answers", "refusals", "finishes"):
            getattr(self, name).update(getattr(other, name))
        self.disconnect_count += other.disconnect_count
        self.connection_count += other.connection_count
        self.document_count += other.document_count
        for name in ("first_token", "between_tokens", "whole", "to_socket"):
            getattr(self, name).include(getattr(other, name))

    @property
    def failure_count(self) -> int:
        """Answers with status 500: faults of the server."""
        return sum(count for (_, status), count in self.answers.items() if status == 500)


def together(tallies: Iterable[Tally]) -> Tally:
    made = Tally()
    for tally in tallies:
        made.include(tally)
    return made


class Shelf:
    """The files of all processes of a server, in a folder that only its user may read."""

    def __init__(self, folder: str | Path, *, count: int, front: int = 0, life: int = 0) -> None:
        self._folder = Path(folder)
        self._count = count
        self._has_all = False
        self._own = self._folder / f"{front}-{life}.tally"

    def put(self, tally: Tally) -> None:
        _write(self._own, tally)

    def others(self) -> list[Tally]:
        paths = [path for path in self._folder.glob("*.tally") if path != self._own]
        return [tally for path in paths if (tally := _read(path)) is not None]

    def has_all(self) -> bool:
        """Whether every process, or another in its place, has been ready once; this one counts."""
        if not self._has_all:
            fronts = {path.name.partition("-")[0] for path in self._folder.glob("*.tally")}
            self._has_all = len(fronts) == self._count
        return self._has_all

    def close(self) -> None:
        """The process that put its counts here has ended, and with it all that it had at present.
        Another one says so: the process may have been killed."""
        if (last := _read(self._own)) is not None:
            last.connection_count = last.document_count = 0
            _write(self._own, last)


def _write(path: Path, tally: Tally) -> None:
    """Replaces the file at once: a reader sees all of the new one or all of the old one."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.msgpack.encode(tally))
    fresh.replace(path)


def _read(path: Path) -> Tally | None:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Tally)
    except (OSError, *UNDECODABLE):
        return None
