"""uvicorn's HTTP protocol with the limits that uvicorn leaves to a proxy in front.

A connection beyond the most that are held is answered 503 and closed. Request line and headers
together have a length and a time in which they must be complete.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ess.server.process.tally import Tally

HEAD_S: Final = 30.0
STRAIGHT: Final = "ess.straight"

BUSY: Final = (
    b'{"error":{"message":"this server holds as many connections as it may","type":"overloaded",'
    b'"param":null,"code":"connections"}}'
)


def refusal(status: bytes, body: bytes, *headers: bytes) -> bytes:
    head = (
        b"HTTP/1.1 " + status,
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"connection: close",
        b"x-request-id: " + secrets.token_hex(16).encode(),
        *headers,
    )
    return b"\r\n".join(head) + b"\r\n\r\n" + body


class Straight:
    """Writes body chunks of a started answer straight to the socket, without ASGI.

    An event through `send` costs more in calls and awaits than in the write itself. This is
    uvicorn's own write without them, and only where its `send` would not have waited: a reader that
    is behind, a client that is gone and an answer that is over are left to it.
    """

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    def is_free(self) -> bool:
        return not (self._flow.write_paused or self._cycle.disconnected)

    def write(self, ready: bytes) -> None:
        assert self._cycle.chunked_encoding, "the answer has begun, and it has no length"
        assert not self._cycle.response_complete, "nothing follows an end"
        self._write(b"%x\r\n%b\r\n" % (len(ready), ready))


class LimitedProtocol(HttpToolsProtocol):
    connections_max = 1024
    head_bytes_max = 32 << 10
    tally: Tally

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.tally.connection_count = len(self.connections)
        if len(self.connections) > self.connections_max:
            self.tally.refusals["connections"] += 1
            busy = refusal(
                b"503 Service Unavailable", BUSY, b"retry-after: 1", b"x-ess-reason: connections"
            )
            transport.write(busy)
            transport.close()
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._got_head()
        super().connection_lost(exc)
        self.tally.connection_count = len(self.connections)

    def data_received(self, received: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._head_timer is not None:
            self._head_bytes += len(received)
            if self._head_bytes > self.head_bytes_max and b"\r\n\r\n" not in received:
                self._refuse_head()
                return
        super().data_received(received)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._got_head()
        length = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if length > self.head_bytes_max:
            self._refuse_head()
            return
        super().on_headers_complete()
        self.scope["extensions"] = {STRAIGHT: Straight(self.cycle)}  # type: ignore[dict-item]

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_bytes = 0
            self._head_timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _got_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to bytes that are not HTTP, as one of our JSON errors."""
        body = b'{"error":{"message":"the request is not HTTP/1.1","type":"invalid_request_error",'
        self.transport.write(refusal(b"400 Bad Request", body + b'"param":null,"code":null}}'))
        self.transport.close()

    def _refuse_head(self) -> None:
        sentence = b"the request's line and headers are longer than %d bytes" % self.head_bytes_max
        body = b'{"error":{"message":"%b","type":"invalid_request_error",' % sentence
        body += b'"param":null,"code":null}}'
        self.transport.write(refusal(b"431 Request Header Fields Too Large", body))
        self.transport.close()


def limited(*, connections_max: int, head_bytes_max: int, tally: Tally) -> type[LimitedProtocol]:
    """A protocol class with these limits: uvicorn creates the instances itself."""
    return type(
        "LimitedHere",
        (LimitedProtocol,),
        {"connections_max": connections_max, "head_bytes_max": head_bytes_max, "tally": tally},
    )
