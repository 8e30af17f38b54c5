"""Time as a value that is passed in, so that one seed replays a run."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float: ...

    def now_ns(self) -> int:
        return round(self.now_s() * 1e9)


class RealClock(Clock):
    def now_s(self) -> float:
        return time.monotonic()

    now_ns = staticmethod(time.monotonic_ns)


class ManualClock(Clock):
    """A clock that moves only when it is told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, by_s: float) -> None:
        assert by_s >= 0.0, "time does not run backwards"
        self._now_s += by_s
