"""A team over a line of a given speed, in one process, that counts the time it was waited for.

A rank's exchanges leave one after another at `bytes_per_s`; each arrives `latency_s` later. An
exchange is complete when its slowest part is. A rank that waits for it sleeps that long: this is
communication that nothing has hidden. Waiting for a peer to begin its exchange is not counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ess.comm.team import PendingParts, Team, WrappedTeam


@dataclass(slots=True)
class Line:
    """The line, shared by all ranks."""

    latency_s: float
    bytes_per_s: float
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _free_s: dict[int, float] = field(default_factory=dict)
    _due_s: dict[int, float] = field(default_factory=dict)

    def send(self, rank: int, number: int, size: int) -> None:
        with self._lock:
            free_s = max(self._free_s.get(rank, 0.0), time.monotonic()) + size / self.bytes_per_s
            self._free_s[rank] = free_s
            self._due_s[number] = max(self._due_s.get(number, 0.0), free_s + self.latency_s)

    def due_s(self, number: int) -> float:
        """When the exchange is complete; all ranks have sent their part."""
        with self._lock:
            return self._due_s[number]


class LateTeam(WrappedTeam):
    """`exposed_s` is how long this rank has slept for the line."""

    def __init__(self, team: Team, line: Line) -> None:
        super().__init__(team)
        self.exposed_s = 0.0
        self._line = line
        self._number = 0

    def start(self, content: Tensor, given: Sequence[int], due: Sequence[int]) -> PendingParts:
        number = self._send(sum(given) - given[self.rank])
        return _Late(self, super().start(content, given, due), self._line, number)

    def spread(self, content: Tensor) -> PendingParts:
        number = self._send(len(content) * (self.size - 1))
        return _Late(self, super().spread(content), self._line, number)

    def _send(self, size: int) -> int:
        """The number of the exchange whose part of this size leaves now."""
        number, self._number = self._number, self._number + 1
        self._line.send(self.rank, number, size)
        return number

    def sleep_until(self, due_s: float) -> None:
        left_s = due_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
            self.exposed_s += left_s


class _Late:
    def __init__(self, team: LateTeam, coming: PendingParts, line: Line, number: int) -> None:
        self._team = team
        self._coming = coming
        self._line = line
        self._number = number

    def wait(self) -> Tensor:
        came = self._coming.wait()
        self._team.sleep_until(self._line.due_s(self._number))
        return came
