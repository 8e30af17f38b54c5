"""Frames on a stream socket, without ever waiting.

    frame = head | runs | note | payload
    head    magic, kind, count of runs, bytes of note, checksum of runs and note, transfer, ticket,
            bytes of payload, checksum of the head so far

Payload goes from registered memory to registered memory: the socket reads it into place once the
head and the runs have been checked, so nothing is copied in between, and no frame can make us
allocate more than `RUNS_MAX` runs and a note. A failed check is BadInput: frame boundaries are
lost, and the connection ends. An unwanted payload is read and discarded.
"""

from __future__ import annotations

import socket
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from struct import Struct
from typing import Final

import numpy as np

from ess.errors import BadInput
from ess.transfer.messages import FRAME_BYTES_MAX
from ess.transfer.runs import RUN_BYTES, RUNS_MAX, Runs, no_runs

NOTE_BYTES_MAX: Final = FRAME_BYTES_MAX
PAYLOAD_BYTES_MAX: Final = 1 << 34
QUEUED_MAX: Final = 1 << 18
SCRATCH_BYTES: Final = 1 << 18
VECTORS: Final = 512
READ_BYTES: Final = 8 << 20

_HEAD: Final = Struct("<2sBBIIIQQQ")
_CHECK: Final = Struct("<I")
_HEAD_BYTES: Final = _HEAD.size + _CHECK.size


class Kind(IntEnum):
    HELLO = 1
    WRITE = 2
    # 3 and 4 are free: the other kinds keep their numbers.
    ACCEPTED = 5
    REFUSED = 6
    ALIVE = 7


KINDS: Final = frozenset(Kind)


@dataclass(slots=True)
class Frame:
    kind: Kind
    transfer: int
    ticket: int
    runs: Runs
    note: bytes
    payload_bytes: int
    refusal: str | None = None


Place = Callable[[Frame], Sequence[memoryview] | str]
"""The target of a payload, or the reason why it is refused."""
Stage = Callable[[Place], Frame | None]


class Channel:
    """`sent_bytes` and `read_bytes` count from the start of the connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._out: deque[memoryview] = deque()
        self._targets: deque[memoryview] = deque()
        self._landing: Frame | None = None
        self._head = b""
        self.sent_bytes = 0
        self.read_bytes = 0
        self._begin_head()

    @property
    def is_full(self) -> bool:
        return len(self._out) > QUEUED_MAX

    def close(self) -> None:
        self._out.clear()
        self._sock.close()

    def send(
        self,
        kind: Kind,
        *,
        transfer: int = 0,
        ticket: int = 0,
        runs: Runs | None = None,
        note: bytes = b"",
        payload: Sequence[memoryview] = (),
    ) -> None:
        table = (no_runs() if runs is None else runs).tobytes()
        size = sum(map(len, payload))
        body = table + note
        head = _HEAD.pack(
            *(b"EX", kind, 0, len(table) // RUN_BYTES, len(note), zlib.crc32(body)),
            *(transfer, ticket, size),
        )
        parts = [memoryview(head + _CHECK.pack(zlib.crc32(head)) + body), *payload]
        self._out.extend(parts)

    def push(self) -> None:
        """Sends as much as the socket takes."""
        try:
            while self._out:
                sent = self._sock.sendmsg(list(islice(self._out, VECTORS)))
                _consume(self._out, sent)
                self.sent_bytes += sent
        except BlockingIOError:
            pass

    def frames(self, place: Place) -> Iterator[Frame]:
        """Yields the frames that are complete so far. OSError when the peer has closed."""
        budget = READ_BYTES
        while budget > 0 and (count := self._fill()) is not None:
            budget -= count
            frame = None if self._targets else self._stage(place)
            if frame is not None:
                yield frame

    def is_landing(self, ticket: int) -> bool:
        """Whether the payload of a write under this ticket is being read into memory."""
        frame = self._landing
        if frame is None or frame.refusal is not None:
            return False
        return frame.kind is Kind.WRITE and frame.ticket == ticket

    def stop_landing(self, ticket: int) -> None:
        """Discards the rest of a payload that is being read under this ticket."""
        frame = self._landing
        if frame is not None and self.is_landing(ticket):
            frame.refusal = f"ticket {ticket} has ended"
            self._targets = self._discarding(sum(map(len, self._targets)))

    def _fill(self) -> int | None:
        """Reads into the memory that is due; None when nothing has come."""
        if not self._targets:
            return 0
        try:
            count = self._sock.recvmsg_into(list(islice(self._targets, VECTORS)))[0]
        except BlockingIOError:
            return None
        if count == 0:
            raise ConnectionResetError("it closed the connection")
        _consume(self._targets, count)
        self.read_bytes += count
        return count

    def _expect(self, size: int, stage: Stage) -> None:
        self._bytes = bytearray(size)
        self._targets = deque([memoryview(self._bytes)] if size else [])
        self._stage = stage

    def _begin_head(self) -> None:
        self._landing = None
        self._expect(_HEAD_BYTES, self._end_head)

    def _end_head(self, place: Place) -> Frame | None:
        head = bytes(self._bytes)
        magic, kind, zero, run_count, note_bytes, _, _, _, size = _HEAD.unpack_from(head)
        (check,) = _CHECK.unpack_from(head, _HEAD.size)
        if magic != b"EX" or zero or check != zlib.crc32(head[: _HEAD.size]):
            raise BadInput(f"no frame begins {head[:8]!r}")
        if kind not in KINDS or run_count > RUNS_MAX or note_bytes > NOTE_BYTES_MAX:
            raise BadInput(f"a frame of kind {kind}, {run_count} runs, {note_bytes} bytes of note")
        if size > PAYLOAD_BYTES_MAX:
            raise BadInput(f"a payload of {size} bytes, at most {PAYLOAD_BYTES_MAX}")
        self._head = head
        self._expect(run_count * RUN_BYTES + note_bytes, self._end_body)
        return None

    def _end_body(self, place: Place) -> Frame | None:
        body = bytes(self._bytes)
        _, kind, _, run_count, _, check, transfer, ticket, size = _HEAD.unpack_from(self._head)
        if check != zlib.crc32(body):
            raise BadInput("the checksum of a frame is wrong")
        runs = np.frombuffer(body, "<i8", 3 * run_count).astype(np.int64).reshape(-1, 3)
        note = body[run_count * RUN_BYTES :]
        frame = Frame(Kind(kind), transfer, ticket, runs, note, size)
        self._land(frame, place(frame))
        return None

    def _land(self, frame: Frame, targets: Sequence[memoryview] | str) -> None:
        if isinstance(targets, str):
            frame.refusal = targets
            self._targets = self._discarding(frame.payload_bytes)
        else:
            self._targets = deque(targets)
        if sum(map(len, self._targets)) != frame.payload_bytes:
            raise BadInput(f"a {frame.kind.name} with a payload of {frame.payload_bytes} bytes")
        self._landing, self._stage = frame, self._end_payload

    def _end_payload(self, place: Place) -> Frame | None:
        frame = self._landing
        self._begin_head()
        return frame

    def _discarding(self, size: int) -> deque[memoryview]:
        scratch = memoryview(bytearray(min(size, SCRATCH_BYTES)))
        whole, rest = divmod(size, SCRATCH_BYTES)
        return deque([scratch] * whole + ([scratch[:rest]] if rest else []))


def _consume(parts: deque[memoryview], count: int) -> None:
    """Drops the first `count` bytes of the parts."""
    while count:
        if len(parts[0]) > count:
            parts[0] = parts[0][count:]
            return
        count -= len(parts.popleft())
