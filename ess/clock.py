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
