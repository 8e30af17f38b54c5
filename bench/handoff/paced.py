"""A real transport slowed down: bytes leave no faster than at a chosen rate."""

from __future__ import annotations

from collections import deque

from ess.clock import Clock
from ess.transfer.runs import byte_count
from ess.transfer.transport import Event, Transfer, Transport
from ess.transfer.transports.around import WrappedTransport


class PacedTransport(WrappedTransport):
    """Transfers leave in order, each after the time that the link needs for the earlier ones.

    The time of a transfer is its bytes over the rate, counted from its post or from the end of the
    transfer before, whichever is later.
    """

    def __init__(self, inner: Transport, *, bytes_per_s: float, clock: Clock) -> None:
        super().__init__(inner)
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at_s = clock.now_s()
        self._waiting: deque[tuple[float, int, Transfer]] = deque()

    def post(self, transfer: Transfer) -> int:
        handle, took_s = self._next_handle(), byte_count(transfer.local) / self.bytes_per_s
        self._free_at_s = max(self._free_at_s, self._clock.now_s()) + took_s
        self._waiting.append((self._free_at_s, handle, transfer))
        return handle

    def poll(self) -> list[Event]:
        now_s = self._clock.now_s()
        while self._waiting and self._waiting[0][0] <= now_s:
            _, handle, transfer = self._waiting.popleft()
            self._pass_on(handle, transfer)
        return self._polled()
