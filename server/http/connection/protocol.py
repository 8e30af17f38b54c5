"""uvicorn's HTTP protocol with the limits that uvicorn leaves to a proxy in front.

Everything here applies before a key is checked, so each connection is bounded in memory and in
time, whatever it sends:

    head      bytes, headers, seconds; requests waiting behind one that is being answered
    body      a deadline that grows with the bytes received; extensions and trailers are bounded
              and dropped. The gate bounds the length of the body itself
    answer    a reader that takes nothing is cut off, even while the connection closes, and the
              slowest of those for whom too much waits
    between   blank lines do not keep an idle connection open

Beyond `connections_max` a few connections are accepted for probes and for our other workers, so
that a crowd, or an attack, does not make the server look dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Final, cast

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ess.server.http.connection import refusals
from ess.server.http.connection.outlets import STRAIGHT, Outlet, Straight, without_chunks
from ess.server.http.connection.reader_watch import ReaderWatch
from ess.server.http.connection.received_body import Body
from ess.server.http.connection.refusals import Refusal, Stop
from ess.server.process.bounds import (
    FRAMING_BYTES_MAX,
    HEAD_S,
    HEADERS_MAX,
    LINGER_S,
    PIPELINED_MAX,
    PROBE_CONNECTIONS,
    PROBE_HEAD_S,
    UNREAD_BYTES,
)
from ess.server.process.tally import Tally

PROBE_PATHS: Final = frozenset({b"/health", b"/ping", b"/ready", b"/metrics", b"/peers"})


class LimitedProtocol(HttpToolsProtocol):
    connections_max = 1024
    head_bytes_max = 32 << 10
    stall_s = 60.0
    unsent_max = UNREAD_BYTES
    tally: Tally
    slow: set[ReaderWatch]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._made_s = self.loop.time()
        self._head_bytes = 0
        self._is_in_head = self._is_extra = self._is_deaf = False
        self._keeps_alive = True
        self._outlet: Outlet
        self._body: Body | None = None
        self._running: RequestResponseCycle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._reader: ReaderWatch

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._outlet = Outlet(transport, self._part)
        self._reader = ReaderWatch(
            transport,
            self.loop,
            stall_s=self.stall_s,
            tally=self.tally,
            slow=self.slow,
            unsent_max=self.unsent_max,
        )
        self.tally.connection_count = len(self.connections)
        self._is_extra = len(self.connections) > self.connections_max
        if self._is_extra and not self._has_room():
            transport.write(self._busy().answer())
            self._close()
            return
        self._expect_head()

    def _has_room(self) -> bool:
        """Makes room for an extra connection, by closing the oldest idle extra one if necessary."""
        if len(self.connections) <= self.connections_max + PROBE_CONNECTIONS:
            return True
        others = cast("Iterable[LimitedProtocol]", self.connections - {self})
        waiting = [other for other in others if other._is_idle_extra()]
        if not waiting:
            return False
        min(waiting, key=lambda other: other._made_s).transport.abort()
        return True

    def _busy(self) -> Refusal:
        self.tally.refusals["connections"] += 1
        return refusals.BUSY

    def _is_idle_extra(self) -> bool:
        is_waiting = self._is_in_head or self._is_deaf
        return self._is_extra and is_waiting and not self.transport.is_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells all requests: uvicorn tells only the newest, but an older request may still be
        answered."""
        self._stop_deadline()
        self._reader.end()
        self._disconnect(self._running)
        super().connection_lost(exc)
        self.tally.connection_count = len(self.connections)

    def _disconnect(self, cycle: RequestResponseCycle | None) -> None:
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def shutdown(self) -> None:
        self._keeps_alive = False
        super().shutdown()

    # ---- what comes in

    def data_received(self, received: bytes) -> None:
        if self._is_deaf or self.transport.is_closing():
            return
        is_between = self.timeout_keep_alive_task is not None and not self._is_in_head
        if is_between and not received.strip(b"\r\n"):
            return
        if self._is_in_head:
            self._head_bytes += len(received)
            if self._head_bytes > self.head_bytes_max and b"\r\n\r\n" not in received:
                self._refuse(refusals.long_head(self.head_bytes_max))
                return
        body, before = self._body, self._body.accounted if self._body else 0
        self._parse(received)
        if body is not None and body is self._body:
            self._count_framing(body, len(received) - (body.accounted - before))
        if self._body is not None and self._deadline is None and not self._is_deaf:
            self._deadline = self.loop.call_later(self._body.within_s, self._check_body)

    def _parse(self, received: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            rest = self._feed(received)
            if rest is not None:
                self._parse_again(rest)
        except httptools.HttpParserError as error:
            stop = error.__context__
            self._refuse(stop.refusal if isinstance(stop, Stop) else refusals.NOT_HTTP)

    def _feed(self, received: bytes) -> bytes | None:
        """Feeds the parser; returns what follows the head of a request that offers to upgrade."""
        try:
            self.parser.feed_data(received)
        except httptools.HttpParserUpgrade as upgrade:
            return received[upgrade.args[0] :]
        return None

    def _parse_again(self, rest: bytes) -> None:
        """Ignores an offer to upgrade: parses the same head without it, then the body.

        The parser reads no body after such an offer, which Java's client makes with every first
        request.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        kept = [(name, value) for name, value in self.headers if name != b"upgrade"]
        head = [b"%b %b HTTP/%b" % (method, self.url, version)]
        head += [b"%b: %b" % header for header in kept]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join(head) + b"\r\n\r\n" + rest)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._is_in_head:
            self._expect_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts and drops trailers, which come here too."""
        if self._body is None and len(self.headers) <= HEADERS_MAX:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_deadline()
        self._check_head()
        if self.parser.should_upgrade():
            self._check_upgrade()
            return
        super().on_headers_complete()
        self._body = Body(self.loop.time())
        self.scope["extensions"] = {STRAIGHT: Straight(self.cycle)}  # type: ignore[dict-item]
        self._open(self.cycle)

    def _open(self, cycle: RequestResponseCycle) -> None:
        """An answer that begins before the body has been read is the connection's last."""
        cycle.transport = cast(asyncio.Transport, self._outlet)
        if cycle.scope["http_version"] == "1.0":
            without_chunks(cycle)
        self._keeps_alive = cycle.keep_alive and not self._is_extra
        cycle.keep_alive = False

    def _check_head(self) -> None:
        length = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if length > self.head_bytes_max:
            raise Stop(refusals.long_head(self.head_bytes_max))
        if len(self.headers) > HEADERS_MAX:
            raise Stop(refusals.many_headers(HEADERS_MAX))
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if any(coding.lower() != b"chunked" for coding in codings):
            raise Stop(refusals.UNKNOWN_CODING)
        if len(self.pipeline) >= PIPELINED_MAX:
            raise Stop(refusals.many_pipelined(PIPELINED_MAX))
        is_crowded = self._is_extra and len(self.connections) > self.connections_max
        if is_crowded and self.url.partition(b"?")[0] not in PROBE_PATHS:
            raise Stop(self._busy())

    def _check_upgrade(self) -> None:
        offered = {value.lower() for name, value in self.headers if name == b"upgrade"}
        if self.parser.get_method() == b"CONNECT" or b"websocket" in offered:
            raise Stop(refusals.NO_UPGRADE)

    def on_body(self, body: bytes) -> None:
        assert self._body is not None, "a head comes before a body"
        self._body.byte_count += len(body)
        super().on_body(body)

    def on_chunk_header(self) -> None:
        assert self._body is not None, "a head comes before a body"
        self._body.chunk_count += 1
        self._body.check_chunks()

    def on_message_complete(self) -> None:
        if self._body is None:
            return
        self._body = None
        self._stop_deadline()
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keeps_alive
        super().on_message_complete()

    def _count_framing(self, body: Body, count: int) -> None:
        """Counts bytes around the chunks of a read; never below 0: plain chunks earn no credit."""
        body.framing_count = max(0, body.framing_count + count)
        if body.framing_count > FRAMING_BYTES_MAX and not self._is_deaf:
            self._refuse(refusals.long_framing(FRAMING_BYTES_MAX))

    # ---- deadlines

    def _expect_head(self) -> None:
        self._is_in_head = True
        self._head_bytes = 0
        self._stop_deadline()
        within_s = PROBE_HEAD_S if self._is_extra else HEAD_S
        self._deadline = self.loop.call_later(within_s, self._check_in_head)

    def _check_in_head(self) -> None:
        """Ends a late head, unless the answer before it is under way: then it may take its time."""
        if self._is_answering():
            self._deadline = self.loop.call_later(HEAD_S, self._check_in_head)
        elif self._is_extra:
            self._refuse(self._busy())
        else:
            self._close()

    def _check_body(self) -> None:
        """Ends a late body; time in which this server does not read does not count."""
        assert self._body is not None, "the end of a body stops its deadline"
        now_s = self.loop.time()
        if self.flow.read_paused:
            self._body.began_s = now_s
        left_s = self._body.late_at_s() - now_s
        if left_s > 0:
            self._deadline = self.loop.call_later(left_s, self._check_body)
        else:
            self.tally.refusals["slow_body"] += 1
            self._refuse(refusals.late_body(self._body.rate_min))

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # ---- what goes out

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def on_response_complete(self) -> None:
        if not self._is_deaf:
            super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader.begin()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader.end()

    # ---- the end

    def _refuse(self, refusal: Refusal) -> None:
        """Answers the latest request with an error of our own, and ends the connection.

        If an answer is due to an earlier request, or has begun, ours would be taken for it: then
        the connection just ends.
        """
        is_first = self._running is self.cycle and self._body is not None
        if self._is_answering() and not (is_first and not self.cycle.response_started):
            self._close()
            return
        self._disconnect(self._running)
        self.transport.write(refusal.answer())
        self._part(is_unread=True)

    def _part(self, *, is_unread: bool = False) -> None:
        """Closes the connection, but first reads for a while what the client still sends.

        Closing with unread bytes resets the connection, and a reset may overtake the answer: the
        client would see an error instead of a 401 or 413.
        """
        if not (is_unread or self._body is not None) or not self.transport.can_write_eof():
            self._close()
            return
        self._is_deaf = True
        self._stop_deadline()
        self._outlet.stop()
        self.flow.resume_reading()
        self.transport.write_eof()
        self._deadline = self.loop.call_later(LINGER_S, self.transport.abort)

    def _close(self) -> None:
        """Closes once the unsent bytes are out, as long as the client takes them."""
        self._is_deaf = True
        self._stop_deadline()
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._reader.begin()


def limited(
    *,
    connections_max: int,
    head_bytes_max: int,
    stall_s: float,
    tally: Tally,
    unsent_max: int = UNREAD_BYTES,
) -> type[LimitedProtocol]:
    """A protocol class with these limits, as uvicorn creates the instances itself."""
    return type(
        "LimitedHere",
        (LimitedProtocol,),
        {
            "connections_max": connections_max,
            "head_bytes_max": head_bytes_max,
            "stall_s": stall_s,
            "tally": tally,
            "unsent_max": unsent_max,
            "slow": set(),
        },
    )
