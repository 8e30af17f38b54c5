"""A transport that wraps another: passes calls on, under handles of its own."""

from __future__ import annotations

from collections.abc import Sequence

from ess.transfer.runs import Region
from ess.transfer.transport import Completed, Event, Failed, Transfer, Transport


class WrappedTransport:
    """Subclasses decide in `post` and `poll` when a transfer is passed on, and in what form."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._handle_of: dict[int, int] = {}
        self._posted = 0

    @property
    def guards(self) -> bool:
        return self._inner.guards

    @property
    def epoch(self) -> int:
        return self._inner.epoch

    def register(self, regions: Sequence[Region]) -> None:
        self._inner.register(regions)

    def metadata(self) -> bytes:
        return self._inner.metadata()

    def connect(self, metadata: bytes) -> int:
        return self._inner.connect(metadata)

    def allow(self, ticket: int) -> None:
        self._inner.allow(ticket)

    def forbid(self, ticket: int) -> None:
        self._inner.forbid(ticket)

    def is_landing(self, ticket: int) -> bool:
        return self._inner.is_landing(ticket)

    def disconnect(self, peer: int) -> None:
        self._inner.disconnect(peer)

    def close(self) -> None:
        self._inner.close()

    def _next_handle(self) -> int:
        self._posted += 1
        return self._posted

    def _pass_on(self, handle: int, transfer: Transfer) -> None:
        self._handle_of[self._inner.post(transfer)] = handle

    def _polled(self) -> list[Event]:
        """The inner transport's events under our handles."""
        renamed = [self._renamed(event) for event in self._inner.poll()]
        return [event for event in renamed if event is not None]

    def _renamed(self, event: Event) -> Event | None:
        """None for a transfer that the subclass itself posted: the caller knows no such handle."""
        match event:
            case Completed(inner):
                handle = self._handle_of.pop(inner, None)
                return None if handle is None else Completed(handle)
            case Failed(inner, reason):
                handle = self._handle_of.pop(inner, None)
                return None if handle is None else Failed(handle, reason)
        return event
