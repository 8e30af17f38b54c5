"""The engine's latest status: published here, read by metrics, load reports and dashboards.

Routes read `status` or subscribe. A status is a snapshot, not a stream of events: a slow subscriber
gets the newest status and misses those before. The last minute's statuses are kept in `recent`,
without their requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

import msgspec

from ess.clock import Clock
from ess.engine.process.messages import Status
from ess.server.process.handoffs import Handoffs

SUBSCRIBERS_MAX: Final = 8
RATE_OVER_S: Final = 1.0
RECENT_S: Final = 60.0


class Board:
    def __init__(self, clock: Clock) -> None:
        self.status = Status()
        self.tokens_per_s = 0.0
        self.handoffs = Handoffs()
        self._clock = clock
        self._rated = (clock.now_s(), 0)
        self.published_s = clock.now_s()
        self.recent: deque[tuple[float, Status]] = deque()
        self._subscribers: set[asyncio.Event] = set()

    def publish(self, status: Status) -> None:
        self.status, self.published_s = status, self._clock.now_s()
        self.recent.append((self.published_s, msgspec.structs.replace(status, requests=())))
        while self.published_s - self.recent[0][0] > RECENT_S:
            self.recent.popleft()
        self._rate(status)
        if status.handoff is not None:
            self.handoffs.take(status.handoff, self.recent)
        for fresh in self._subscribers:
            fresh.set()

    def forget(self) -> None:
        """The engine is lost; the next one counts from 0."""
        self.status = Status()
        self.tokens_per_s = 0.0
        self.recent.clear()
        self._rated = (self._clock.now_s(), 0)
        for fresh in self._subscribers:
            fresh.set()

    def _rate(self, status: Status) -> None:
        """Updates the rate: tokens per second over about the last second."""
        now_s, (since_s, since_count) = self._clock.now_s(), self._rated
        if now_s - since_s >= RATE_OVER_S:
            self.tokens_per_s = (status.made_count - since_count) / (now_s - since_s)
            self._rated = (now_s, status.made_count)

    @property
    def is_full(self) -> bool:
        return len(self._subscribers) >= SUBSCRIBERS_MAX

    def enter(self) -> asyncio.Event:
        """An event that every publication sets; the subscriber clears it, and calls `leave`."""
        assert not self.is_full, "who watches was asked for a place first"
        fresh = asyncio.Event()
        self._subscribers.add(fresh)
        return fresh

    def leave(self, fresh: asyncio.Event) -> None:
        self._subscribers.discard(fresh)
