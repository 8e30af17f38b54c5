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

from ess.comm.team import PendingParts, Team


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


class LateTeam:
    """`exposed_s` is how long this rank has slept for the line."""

    def __init__(self, team: Team, line: Line) -> None:
        self.rank, self.size = team.rank, team.size
        self.exposed_s = 0.0
        self._team = team
        self._line = line
        self._number = 0

    def barrier(self) -> None:
        self._team.barrier()

    def all_gather(
        self, tensor: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        return self._team.all_gather(tensor, dim, sizes=sizes)

    def all_to_all(self, tensors: list[Tensor]) -> list[Tensor]:
        return self._team.all_to_all(tensors)

    def broadcast(self, content: bytes, root: int = 0) -> bytes:
        return self._team.broadcast(content, root)

    def start(self, content: Tensor, given: Sequence[int], due: Sequence[int]) -> PendingParts:
        number, self._number = self._number, self._number + 1
        self._line.send(self.rank, number, sum(given) - given[self.rank])
        return _Late(self, self._team.start(content, given, due), self._line, number)

    def spread(self, content: Tensor) -> PendingParts:
        number, self._number = self._number, self._number + 1
        self._line.send(self.rank, number, len(content) * (self.size - 1))
        return _Late(self, self._team.spread(content), self._line, number)

    def check(self) -> None:
        self._team.check()

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
