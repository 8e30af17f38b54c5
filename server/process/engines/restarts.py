"""How often, and how soon, a lost engine is started again."""

from __future__ import annotations

from collections import deque
from typing import Final

from ess.clock import Clock
from ess.server.process.engines.group import Loss

OVER_S: Final = 600.0
PAUSE_S: Final = 0.5
PAUSE_MAX_S: Final = 10.0


class Restarts:
    """Allows at most `most` restarts within OVER_S. If the first engine ends by itself before it
    was ready, the next would end in the same way: the weights are broken, or there is too little
    memory. So it is not restarted, unless it waits for `others`, on machines that may come later.

    An engine that has answered a request is replaced at once, as its streams wait. One that has
    answered none is replaced after a pause, twice as long as the pause before."""

    def __init__(self, most: int, clock: Clock, *, waits_for_others: bool = False) -> None:
        self.most = most
        self._clock = clock
        self._waits_for_others = waits_for_others
        self._at_s: deque[float] = deque()
        self._pause_s = 0.0

    @property
    def count(self) -> int:
        """Restarts within the last OVER_S."""
        since_s = self._clock.now_s() - OVER_S
        while self._at_s and self._at_s[0] < since_s:
            self._at_s.popleft()
        return len(self._at_s)

    def why_not(self, loss: Loss, *, was_ready: bool) -> str:
        """Why there is no restart, as the end of a sentence; empty if there is one."""
        if self.most and self.count >= self.most:
            times = "once" if self.most == 1 else f"{self.most} times"
            return (
                f"; it was started again {times} within {OVER_S / 60:g} minutes, which is the most"
            )
        if not self.most or (loss.is_said and not was_ready and not self._waits_for_others):
            return "; it is not started again"
        return ""

    def add(self, *, was_of_use: bool) -> float:
        """Counts a restart; returns the pause before it in seconds."""
        self._at_s.append(self._clock.now_s())
        longer_s = min(max(PAUSE_S, 2 * self._pause_s), PAUSE_MAX_S)
        self._pause_s = 0.0 if was_of_use else longer_s
        return self._pause_s
