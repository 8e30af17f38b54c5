"""Cuts off a client that reads nothing of what waits for it, or the slowest of too many."""

from __future__ import annotations

import asyncio
from typing import Final

from ess.server.process.tally import Tally
from ess.units import div_ceil

LOOK_S: Final = 10.0


class ReaderWatch:
    """From `begin` to `end` the client must take something in every `stall_s`.

    An answer that is no stream is written whole, and waits here until it has been read. A client
    that keeps up takes it within LOOK_S, the others are `slow`. If more than `unsent_max` bytes
    wait for these together, those for which most waits are cut off. One that is alone may take its
    time.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        *,
        stall_s: float,
        tally: Tally,
        slow: set[ReaderWatch],
        unsent_max: int,
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._look_s = min(stall_s, LOOK_S)
        self._looks_max = div_ceil(round(stall_s * 1e3), round(self._look_s * 1e3))
        self._tally = tally
        self._slow = slow
        self._unsent_max = unsent_max
        self._timer: asyncio.TimerHandle | None = None

    @property
    def unsent(self) -> int:
        return self._transport.get_write_buffer_size()

    def begin(self) -> None:
        self.end()
        self._look_later(self.unsent, idle_count=0)

    def end(self) -> None:
        self._slow.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self, before: int, *, idle_count: int) -> None:
        self._timer = self._loop.call_later(self._look_s, self._look, before, idle_count)

    def _look(self, before: int, idle_count: int) -> None:
        unsent = self.unsent
        idle_count = 0 if unsent < before else idle_count + 1
        if idle_count == self._looks_max:
            self._cut()
            return
        self._look_later(unsent, idle_count=idle_count)
        self._slow.add(self)
        self._make_room()

    def _make_room(self) -> None:
        slow = sorted(self._slow, key=lambda watch: watch.unsent)
        total = sum(watch.unsent for watch in slow)
        while total > self._unsent_max and len(slow) > 1:
            fullest = slow.pop()
            total -= fullest.unsent
            fullest._cut()

    def _cut(self) -> None:
        self.end()
        self._tally.refusals["slow_reader"] += 1
        self._transport.abort()
