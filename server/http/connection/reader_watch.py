"""Cuts off a client that reads nothing of what waits for it."""

from __future__ import annotations

import asyncio

from ess.server.process.tally import Tally


class ReaderWatch:
    """From `begin` to `end` the client must take something in every `stall_s`."""

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        *,
        stall_s: float,
        tally: Tally,
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._stall_s = stall_s
        self._tally = tally
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self.end()
        unsent = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._stall_s, self._check, unsent)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, before: int) -> None:
        if self._transport.get_write_buffer_size() >= before:
            self._tally.refusals["slow_reader"] += 1
            self._transport.abort()
        else:
            self.begin()
