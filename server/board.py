"""The one place where the engine's state is published, and read from.

Whoever shows it, as metrics, as a load report or live, reads `status` or subscribes. A status is a
moment, not a stream of events: a slow subscriber gets the newest and misses those between.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from ess.clock import Clock
from ess.engine.messages import Status
from ess.errors import Unavailable

SUBSCRIBERS_MAX: Final = 8
RATE_OVER_S: Final = 1.0


class Board:
    def __init__(self, clock: Clock) -> None:
        self.status = Status()
        self.tokens_per_s = 0.0
        self._clock = clock
        self._rated = (clock.now_s(), 0)
        self._subscribers: set[asyncio.Event] = set()

    def publish(self, status: Status) -> None:
        self.status = status
        self._rate(status)
        for fresh in self._subscribers:
            fresh.set()

    def _rate(self, status: Status) -> None:
        """Tokens per second over the last second or so."""
        now_s, (since_s, since_count) = self._clock.now_s(), self._rated
        if now_s - since_s >= RATE_OVER_S:
            self.tokens_per_s = (status.made_count - since_count) / (now_s - since_s)
            self._rated = (now_s, status.made_count)

    async def watch(self) -> AsyncIterator[Status]:
        """Every status that there is time for; ends when the reader stops."""
        if len(self._subscribers) >= SUBSCRIBERS_MAX:
            raise Unavailable(f"{SUBSCRIBERS_MAX} viewers are watching; that is the most served")
        fresh = asyncio.Event()
        self._subscribers.add(fresh)
        try:
            while True:
                await fresh.wait()
                fresh.clear()
                yield self.status
        finally:
            self._subscribers.discard(fresh)
