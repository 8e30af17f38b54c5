"""Cuts off a client that reads nothing of what waits for it, or the slowest of too many."""

from __future__ import annotations

import asyncio
from typing import Final

from ess.server.process.tally import Tally
from ess.units import div_ceil

LOOK_S: Final = 10.0


class ReaderWatch:
    """From `begin` to `end` the client must take something in every `stall_s`.

    An answer that is no stream is written whole, and waits here until it has been read. If more
    than `unsent_max` bytes wait in all `waiting` connections together, the one for which most waits
    is cut off, once it has had LOOK_S: a client that keeps up has taken its answer by then. One
    that is alone may take its time.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        *,
        stall_s: float,
        tally: Tally,
        waiting: set[ReaderWatch],
        unsent_max: int,
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._look_s = min(stall_s, LOOK_S)
        self._looks_max = div_ceil(round(stall_s * 1e3), round(self._look_s * 1e3))
        self._tally = tally
        self._waiting = waiting
        self._unsent_max = unsent_max
        self._timer: asyncio.TimerHandle | None = None

    @property
    def unsent(self) -> int:
        return self._transport.get_write_buffer_size()

    def begin(self) -> None:
        self.end()
        self._waiting.add(self)
        self._look_later(self.unsent, idle_count=0)

    def end(self) -> None:
        self._waiting.discard(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self, before: int, *, idle_count: int) -> None:
        self._timer = self._loop.call_later(self._look_s, self._look, before, idle_count)

    def _look(self, before: int, idle_count: int) -> None:
        unsent = self.unsent
        idle_count = 0 if unsent < before else idle_count + 1
        if idle_count < self._looks_max and not self._is_too_much(unsent):
            self._look_later(unsent, idle_count=idle_count)
            return
        self.end()
        self._tally.refusals["slow_reader"] += 1
        self._transport.abort()

    def _is_too_much(self, own: int) -> bool:
        """Whether too much waits for several, and nowhere more than here."""
        sizes = [watch.unsent for watch in self._waiting]
        return len(sizes) > 1 and sum(sizes) > self._unsent_max and own >= max(sizes)
