"""How often an engine that was lost is started again."""

from __future__ import annotations

from collections import deque
from typing import Final

from ess.clock import Clock
from ess.server.process.engines.group import Loss

OVER_S: Final = 600.0


class Restarts:
    """At most `most` within OVER_S. What ends by itself before any engine has been ready ends in
    that way again: the weights are broken, or the memory does not suffice. So it is not started
    again, unless it waits for `others`, on machines that may come later."""

    def __init__(self, most: int, clock: Clock, *, waits_for_others: bool = False) -> None:
        self.most = most
        self._clock = clock
        self._waits_for_others = waits_for_others
        self._at_s: deque[float] = deque()

    @property
    def count(self) -> int:
        """Those of the last OVER_S."""
        since_s = self._clock.now_s() - OVER_S
        while self._at_s and self._at_s[0] < since_s:
            self._at_s.popleft()
        return len(self._at_s)

    def why_not(self, loss: Loss, *, was_ready: bool) -> str:
        """What is to be said of it if there is no other start; empty if there is."""
        if self.most and self.count >= self.most:
            times = "once" if self.most == 1 else f"{self.most} times"
            return (
                f"; it was started again {times} within {OVER_S / 60:g} minutes, which is the most"
            )
        if not self.most or (loss.is_said and not was_ready and not self._waits_for_others):
            return "; it is not started again"
        return ""

    def add(self) -> None:
        self._at_s.append(self._clock.now_s())
