"""Sealed messages over a TCP socket: heads of frames, receipts, heartbeats, goodbyes.

    message = start | seal | body
    start   magic, kind, zero, bytes of body, number; the seal is an HMAC over start and body

In the greeting both sides prove that they know the group's secret; from it and two fresh nonces
they derive a key for each direction. The messages of a direction are numbered without a gap, so
that none can be altered, repeated, left out or taken from another connection. A message that fails
a check is BadInput and ends the connection; no message makes us allocate more than its kind allows.

A write waits for a peer that does not read, for at most the patience of the socket.
"""

from __future__ import annotations

import hmac
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

from ess.comm.link import HEAD_BYTES_MAX
from ess.errors import BadInput

SENTENCE_BYTES_MAX: Final = 4096
GREETING_S: Final = 2.0
LOCK_S: Final = 0.2

_START: Final = Struct("<2sBBIQ")
_HELLO: Final = Struct("<4sIIIQ32s")
_TIMEVAL: Final = Struct("@qq")
_SEAL_BYTES: Final = 16
_MAGIC: Final = b"EL"


class Kind(IntEnum):
    FRAME = 1
    TAKEN = 2
    BEAT = 3
    FAIL = 4
    BYE = 5
    READY = 6
    GO = 7


FRAME_BYTES_MAX: Final = HEAD_BYTES_MAX + 64
_BODY_BYTES_MAX: Final = {
    Kind.FRAME: FRAME_BYTES_MAX,
    Kind.BEAT: 8,
    Kind.FAIL: SENTENCE_BYTES_MAX + 8,
}


class Message(NamedTuple):
    kind: Kind
    body: bytes


class Ends(NamedTuple):
    """Identifies a connection: its purpose, its generation, the two ranks."""

    purpose: int
    generation: int
    dialler: int
    answerer: int


class Wire:
    """One connection. Any thread may write; one thread reads."""

    def __init__(self, sock: socket.socket, *, writes: bytes, reads: bytes, patience_s: float):
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        seconds, rest = divmod(round(patience_s * 1e6), 1_000_000)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(seconds, rest))
        self._sock = sock
        self._key = {"write": writes, "read": reads}
        self._number = {"write": 0, "read": 0}
        self._writing = threading.Lock()

    def write(self, kind: Kind, body: bytes = b"") -> None:
        """Sends a message; OSError when the peer is gone or does not read."""
        with self._writing:
            self._sock.sendall(self._sealed(kind, body))

    def try_write(self, kind: Kind, body: bytes = b"") -> bool:
        """Sends a small message if it can leave at once. A partial send ends the connection."""
        if not self._writing.acquire(timeout=LOCK_S):
            return False
        try:
            content = self._sealed(kind, body)
            if self._sock.send(content, socket.MSG_DONTWAIT) < len(content):
                self.cut()
        except OSError:
            self._number["write"] -= 1
            return False
        finally:
            self._writing.release()
        return True

    def _sealed(self, kind: Kind, body: bytes) -> bytes:
        assert len(body) <= _BODY_BYTES_MAX.get(kind, 0), f"{kind.name} with {len(body)} bytes"
        start = _START.pack(_MAGIC, kind, 0, len(body), self._number["write"])
        self._number["write"] += 1
        return start + _seal(self._key["write"], start + body) + body

    def read(self) -> Message | None:
        """The next message; None at the end of the stream; BadInput if the peer did not seal it."""
        start = _exactly(self._sock, _START.size + _SEAL_BYTES, may_end=True)
        if not start:
            return None
        magic, kind, zero, size, number = _START.unpack_from(start)
        if magic != _MAGIC or zero or kind not in Kind.__members__.values():
            raise BadInput(f"no message begins {start[:8]!r}")
        if size > _BODY_BYTES_MAX.get(kind, 0):
            most = _BODY_BYTES_MAX.get(kind, 0)
            raise BadInput(f"a {Kind(kind).name} with {size} bytes, at most {most}")
        body = _exactly(self._sock, size)
        seal = _seal(self._key["read"], start[: _START.size] + body)
        if not hmac.compare_digest(seal, start[_START.size :]) or number != self._number["read"]:
            raise BadInput(f"message {number} is not sealed, or out of order")
        self._number["read"] += 1
        return Message(Kind(kind), body)

    def limit_reading(self, timeout_s: float | None) -> None:
        """From now on a read raises TimeoutError or BlockingIOError when nothing comes in time."""
        seconds, rest = divmod(round((timeout_s or 0.0) * 1e6), 1_000_000)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(seconds, rest))

    def end_writing(self) -> None:
        """The peer reads what was written, and then the end of the stream."""
        self._shut(socket.SHUT_WR)

    def cut(self) -> None:
        """Wakes the threads that read from this wire or write to it."""
        self._shut(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._sock.close()

    def _shut(self, how: int) -> None:
        try:
            self._sock.shutdown(how)
        except OSError:
            return


def greet(sock: socket.socket, ends: Ends, secret: bytes, *, patience_s: float) -> Wire:
    """Greets as the side that dialled, and waits as long as the socket's timeout says: the other
    side may be at many other greetings first. BadInput when that side does not know the secret."""
    hello = _pack_hello(ends)
    with _closed_unless_met(sock):
        sock.sendall(hello)
        answer = _exactly(sock, _HELLO.size + _SEAL_BYTES)
        keys = _keys(secret, hello + answer[: _HELLO.size])
        if not hmac.compare_digest(answer[_HELLO.size :], _seal(keys["proof"], b"answerer")):
            raise BadInput(f"rank {ends.answerer} does not know the secret of the group")
        sock.sendall(_seal(keys["proof"], b"dialler"))
    return Wire(sock, writes=keys["down"], reads=keys["up"], patience_s=patience_s)


def answer(
    sock: socket.socket, secret: bytes, expected: set[Ends], *, patience_s: float
) -> tuple[Ends, Wire]:
    """Greets as the side that was dialled. BadInput for a dialler that is not expected."""
    sock.settimeout(GREETING_S)
    with _closed_unless_met(sock):
        hello = _exactly(sock, _HELLO.size)
        magic, *numbers, _ = _HELLO.unpack(hello)
        ends = Ends(*numbers)
        if magic != b"ESSL" or ends not in expected:
            raise BadInput(f"the connection {tuple(ends)} was not expected")
        mine = _pack_hello(ends)
        keys = _keys(secret, hello + mine)
        sock.sendall(mine + _seal(keys["proof"], b"answerer"))
        if not hmac.compare_digest(_exactly(sock, _SEAL_BYTES), _seal(keys["proof"], b"dialler")):
            raise BadInput(f"rank {ends.dialler} does not know the secret of the group")
    return ends, Wire(sock, writes=keys["up"], reads=keys["down"], patience_s=patience_s)


@contextmanager
def _closed_unless_met(sock: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        sock.close()
        raise


def _pack_hello(ends: Ends) -> bytes:
    return _HELLO.pack(b"ESSL", *ends, os.urandom(32))


def _keys(secret: bytes, hellos: bytes) -> dict[str, bytes]:
    return {
        use: hmac.digest(secret, use.encode() + hellos, "sha256") for use in ("proof", "down", "up")
    }


def _seal(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")[:_SEAL_BYTES]


def _exactly(sock: socket.socket, size: int, *, may_end: bool = False) -> bytes:
    content = bytearray(size)
    view = memoryview(content)
    while view:
        count = sock.recv_into(view)
        if count == 0:
            if may_end and len(view) == size:
                return b""
            raise ConnectionResetError("it closed the connection")
        view = view[count:]
    return bytes(content)
