"""The engine's end of the wire to the server's processes, its fronts. Needs no torch."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

import zmq

from ess.engine.process.messages import (
    Aborted,
    Cut,
    Flushed,
    FromEngine,
    Held,
    Lost,
    Met,
    Packer,
    Piece,
    Progress,
    Ready,
    Stop,
    ToEngine,
    Traced,
    Tracing,
)


class Wire(Protocol):
    @property
    def front_count(self) -> int: ...

    def take(self, *, timeout_s: float) -> list[ToEngine]: ...

    def give(self, message: FromEngine) -> None: ...


UNREAD_MAX: Final = 256
SEND_MS: Final = 200
PATIENCE_S: Final = 10.0


class SocketWire:
    """One socket per front. `lifeline` is a descriptor that becomes readable when the first front
    is gone, and with it the server.

    A front that reads too slowly blocks us after `UNREAD_MAX` messages: that is what keeps an
    engine from outrunning its server. But a front that takes nothing for `patience_s` would stop
    the streams of all others: it is cut off, its requests are given up as Lost, and the first front
    learns of it. The first front itself is waited for, as long as it lives.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoints: Sequence[str],
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._context = context
        self._endpoints = tuple(endpoints)
        self._patience_s = patience_s
        self._packer = Packer()
        self._poller = zmq.Poller()
        self._sockets = [self._connected(endpoint) for endpoint in endpoints]
        self._is_cut = [False] * len(self._sockets)
        self._cut: list[Lost] = []
        self._ready: bytes | None = None
        self._lifeline: int | None = None

    @property
    def front_count(self) -> int:
        return len(self._sockets)

    def watch(self, lifeline: int) -> None:
        self._lifeline = lifeline
        self._poller.register(lifeline, zmq.POLLIN)

    def take(self, *, timeout_s: float) -> list[ToEngine]:
        cut, self._cut = self._cut, []
        ready = dict(self._poller.poll(0 if cut else int(timeout_s * 1000)))
        if self._lifeline is not None and self._lifeline in ready:
            return [Stop()]
        taken: list[ToEngine] = []
        for front, socket in enumerate(self._sockets):
            if socket in ready and not self._is_cut[front]:
                taken += self._all_from(socket)
        for message in taken:
            if isinstance(message, Lost):
                self._renew(message.front)
        return [*cut, *taken]

    def give(self, message: FromEngine) -> None:
        match message:
            case Progress(pieces, at_s) if self.front_count > 1:
                for front, part in enumerate(self._parts(pieces)):
                    if part:
                        self._give(front, self._packer.pack(Progress(tuple(part), at_s)))
            case Flushed() | Held() | Tracing() | Traced() | Met() | Aborted():
                self._give(message.front, self._packer.pack(message))
            case Cut():
                self._give(0, self._packer.pack(message))
            case _:
                self._give_all(message)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()

    def _connected(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.SNDHWM, UNREAD_MAX)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SNDTIMEO, SEND_MS)
        socket.connect(endpoint)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _all_from(self, socket: zmq.Socket[bytes]) -> list[ToEngine]:
        taken: list[ToEngine] = []
        while True:
            try:
                taken.append(self._packer.for_engine(socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return taken

    def _parts(self, pieces: Sequence[Piece]) -> list[list[Piece]]:
        parts: list[list[Piece]] = [[] for _ in self._sockets]
        for piece in pieces:
            parts[piece.number % len(parts)].append(piece)
        return parts

    def _give_all(self, message: FromEngine) -> None:
        packed = self._packer.pack(message)
        if isinstance(message, Ready):
            self._ready = packed
        for front in range(self.front_count):
            self._give(front, packed)

    def _give(self, front: int, packed: bytes) -> None:
        began_s = time.monotonic()
        while not self._is_cut[front] and not self._is_alone():
            try:
                self._sockets[front].send(packed)
                return
            except zmq.Again:
                if front > 0 and time.monotonic() - began_s > self._patience_s:
                    self._cut_off(front)

    def _cut_off(self, front: int) -> None:
        self._is_cut[front] = True
        self._cut.append(Lost(front))
        self.give(Cut(front))

    def _renew(self, front: int) -> None:
        """A new socket, without the messages that waited for the front that has ended. The front
        that replaces it first gets Ready."""
        assert 0 < front < self.front_count, f"front {front} of {self.front_count} is lost"
        self._poller.unregister(self._sockets[front])
        self._sockets[front].close(linger=0)
        self._sockets[front] = self._connected(self._endpoints[front])
        self._is_cut[front] = False
        if self._ready is not None:
            self._give(front, self._ready)

    def _is_alone(self) -> bool:
        lifeline = self._lifeline
        return lifeline is not None and lifeline in dict(self._poller.poll(0))


@contextlib.contextmanager
def open_wire(
    endpoints: Sequence[str],
) -> Iterator[tuple[SocketWire, zmq.Context[zmq.Socket[bytes]]]]:
    """The wire of this process, whose lifeline is standard input, and the context of its
    sockets."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    wire = SocketWire(context, endpoints)
    wire.watch(sys.stdin.fileno())
    try:
        yield wire, context
    finally:
        wire.close()
        context.term()


def open_counts(numbers: Iterable[int], front_count: int) -> tuple[int, ...]:
    """How many of these requests are each front's."""
    counts = [0] * front_count
    for number in numbers:
        counts[number % front_count] += 1
    return tuple(counts)
