"""A clock for tests."""

from __future__ import annotations

from ess.clock import Clock


class ManualClock(Clock):
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def advance(self, by_s: float) -> None:
        assert by_s >= 0.0, "time does not run backwards"
        self._now_s += by_s
