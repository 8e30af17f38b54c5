"""Where answers are written: the connection's transport, or the short way around ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

STRAIGHT: Final = "ess.straight"


class NoLength(int):
    """What uvicorn counts down instead of a length, for an answer that ends with its connection:
    clients of HTTP/1.0 know no chunks. No body is longer than this, and none is too short."""

    def __lt__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    def __sub__(self, other: object) -> NoLength:
        return self

    __hash__ = int.__hash__


def without_chunks(cycle: RequestResponseCycle) -> None:
    """Before the answer begins: it is written as it is, and its end closes the connection."""
    cycle.chunked_encoding = False
    cycle.expected_content_length = NoLength()


class Straight:
    """Writes body chunks of a started answer straight to the socket, without ASGI.

    An event through `send` costs more in calls and awaits than in the write itself. This is
    uvicorn's own write without them, used only where its `send` would not have waited: slow
    readers, disconnected clients and finished answers are left to `send`.
    """

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    def is_free(self) -> bool:
        return not (self._flow.write_paused or self._cycle.disconnected)

    def write(self, ready: bytes) -> None:
        is_chunked = self._cycle.chunked_encoding
        assert is_chunked is not None, "the answer has begun"
        assert not self._cycle.response_complete, "nothing follows an end"
        self._write(b"%x\r\n%b\r\n" % (len(ready), ready) if is_chunked else ready)


class Outlet:
    """A transport for writing answers; only the protocol closes it."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write: Callable[[bytes], None] = transport.write
        self.is_closing = transport.is_closing
        self.close = close

    def stop(self) -> None:
        """Writes nothing from now on, not even the 100 Continue that a client waits for."""
        self.write = _dropped


def _dropped(piece: bytes) -> None:
    pass
