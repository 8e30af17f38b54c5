"""The engine's sockets to several server processes: which process gets which message, and which may
block another."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from ess.engine.process.messages import (
    Abort,
    Aborted,
    Cut,
    Flush,
    Flushed,
    FromEngine,
    Held,
    Lost,
    Packer,
    Piece,
    Progress,
    Ready,
    Status,
    Stop,
    ToEngine,
    Traced,
    Tracing,
)
from ess.engine.process.wire import UNREAD_MAX, SocketWire, open_wire

READY = Ready(vocabulary=10, length_max=10, load_s=0.0)
Socket = zmq.Socket[bytes]


class Fronts:
    def __init__(self, context: zmq.Context[Socket], folder: Path, count: int) -> None:
        self.context, self.packer = context, Packer()
        self.endpoints = [f"ipc://{folder}/{front}" for front in range(count)]
        self.sockets = [self.bound(front) for front in range(count)]

    def bound(self, front: int) -> Socket:
        made = self.context.socket(zmq.DEALER)
        made.setsockopt(zmq.RCVHWM, 1)
        made.setsockopt(zmq.RCVTIMEO, 10_000)
        made.bind(self.endpoints[front])
        return made

    def heard(self, front: int) -> FromEngine:
        return self.packer.for_server(self.sockets[front].recv())

    def says(self, front: int, message: ToEngine) -> None:
        self.sockets[front].send(self.packer.pack(message))

    def replaced(self, front: int) -> None:
        self.sockets[front].close(linger=0)
        self.sockets[front] = self.bound(front)


@contextlib.contextmanager
def wired(folder: Path, count: int, patience_s: float = 0.3) -> Iterator[tuple[SocketWire, Fronts]]:
    context: zmq.Context[Socket] = zmq.Context()
    fronts = Fronts(context, folder, count)
    wire = SocketWire(context, fronts.endpoints, patience_s=patience_s)
    try:
        yield wire, fronts
    finally:
        wire.close()
        for made in fronts.sockets:
            made.close(linger=0)
        context.destroy(linger=0)


def taken(wire: SocketWire) -> list[ToEngine]:
    for _ in range(100):
        if messages := wire.take(timeout_s=0.1):
            return messages
    raise AssertionError("nothing has come")


def test_every_front_gets_its_own_pieces_and_all_get_what_concerns_all(tmp_path: Path):
    with wired(tmp_path, 3) as (wire, fronts):
        wire.give(READY)
        wire.give(Progress(tuple(Piece(n, (n,)) for n in (3, 4, 6, 10)), 1.5))
        wire.give(Status(step_count=7))
        assert [fronts.heard(front) for front in range(3)] == [READY] * 3
        assert fronts.heard(0) == Progress((Piece(3, (3,)), Piece(6, (6,))), 1.5)
        assert fronts.heard(1) == Progress((Piece(4, (4,)), Piece(10, (10,))), 1.5)
        assert [fronts.heard(front) for front in range(3)] == [Status(step_count=7)] * 3


@pytest.mark.parametrize(
    "answer", [Flushed("", 1), Held(True, 1), Tracing("", 1), Traced((), 0, 1), Aborted(2, 1)]
)
def test_an_answer_goes_to_the_front_that_asked(tmp_path: Path, answer: FromEngine):
    with wired(tmp_path, 3) as (wire, fronts):
        fronts.says(1, Flush(1))
        assert taken(wire) == [Flush(1)]
        wire.give(answer)
        wire.give(Status())
        assert [fronts.heard(front) for front in (0, 1, 1, 2)] == [
            Status(),
            answer,
            *[Status()] * 2,
        ]


FRAMES_MAX = 20_000


def filled(wire: SocketWire, front: int) -> None:
    """Until the front, which reads nothing, has been cut off."""
    noise = Progress((Piece(front, tuple(range(2000))),))
    for _ in range(FRAMES_MAX):
        wire.give(noise)
        if wire._is_cut[front]:
            return
    raise AssertionError(f"front {front} takes {FRAMES_MAX} messages without reading any")


def test_a_front_that_reads_nothing_is_cut_off_and_the_others_go_on(tmp_path: Path):
    with wired(tmp_path, 3) as (wire, fronts):
        filled(wire, 1)
        assert wire.take(timeout_s=0.0) == [Lost(1)], "its requests are given up"
        assert fronts.heard(0) == Cut(1)
        fronts.says(1, Abort(1))
        for number in range(2 * UNREAD_MAX):
            wire.give(Progress((Piece(3 * number + 2),)))
            assert fronts.heard(2) == Progress((Piece(3 * number + 2),))
        assert wire.take(timeout_s=0.0) == [], "nothing is taken from a front that was cut off"


def test_the_next_front_in_a_lost_ones_place_starts_with_ready(tmp_path: Path):
    with wired(tmp_path, 2) as (wire, fronts):
        wire.give(READY)
        filled(wire, 1)
        assert wire.take(timeout_s=0.0) == [Lost(1)]
        fronts.replaced(1)
        fronts.says(0, Lost(1))
        assert taken(wire) == [Lost(1)]
        wire.give(Progress((Piece(1), Piece(2))))
        assert [fronts.heard(1), fronts.heard(1)] == [READY, Progress((Piece(1),))]
        fronts.says(1, Abort(1))
        assert taken(wire) == [Abort(1)]


class Full:
    """A socket that takes nothing; at the fifth try the server ends."""

    def __init__(self, lifeline: int) -> None:
        self.tries = 0
        self._lifeline = lifeline

    def send(self, packed: bytes) -> None:
        self.tries += 1
        if self.tries == 5:
            os.close(self._lifeline)
        raise zmq.Again

    def close(self) -> None: ...


def test_the_first_front_is_waited_for_as_long_as_it_lives(tmp_path: Path):
    reads, writes = os.pipe()
    with wired(tmp_path, 2, patience_s=0.0) as (wire, _):
        wire.watch(reads)
        first, wire._sockets[0] = wire._sockets[0], Full(writes)
        wire.give(Progress((Piece(0),)))
        assert (wire._sockets[0].tries, wire._is_cut) == (5, [False, False])
        assert wire.take(timeout_s=0.0) == [Stop()]
        first.close(linger=0)
    os.close(reads)


def test_a_process_hears_its_server_end_and_lets_its_sockets_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    reads, writes = os.pipe()
    with os.fdopen(reads) as lifeline:
        monkeypatch.setattr(sys, "stdin", lifeline)
        with open_wire([f"ipc://{tmp_path}/front"]) as (wire, context):
            assert wire.take(timeout_s=0.0) == []
            os.close(writes)
            assert wire.take(timeout_s=0.0) == [Stop()]
    assert context.closed
