"""A handoff over a network that does everything wrong: right in the end, or never complete."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ess.errors import BadInput
from ess.transfer.arrivals import Arrivals, Share
from ess.transfer.messages import Again, Piece, PieceKind, checksum
from ess.transfer.runs import views
from ess.transfer.transport import Failed, Notification, PeerLost, Transfer
from ess.transfer.transports.faulty import Fault, FaultyTransport
from tests.support.manual_clock import ManualClock
from tests.transfer.rigs import (
    POISON,
    SCRATCH,
    SEAL,
    TICKET,
    Rig,
    join,
    pages,
    region,
    require,
    rigged,
)

UNIT = 656
LAYERS, PAGES = 7, 9
UID = 5
ROUNDS_MAX = 4_000
ODDS = {
    Fault.DROP: 0.06,
    Fault.DUPLICATE: 0.06,
    Fault.REORDER: 0.06,
    Fault.CORRUPT: 0.06,
    Fault.GARBLE: 0.06,
    Fault.DELAY: 0.06,
    Fault.PARTIAL: 0.06,
    Fault.CUT: 0.02,
}


class Sender:
    """Sends every piece, and again when it failed or was asked for; knows nothing of the count."""

    def __init__(self, rig: Rig, *, odds: dict[Fault, float], seed: int) -> None:
        kind = rig.kind
        self.memory = region(kind, LAYERS * PAGES * UNIT)
        draw = np.random.default_rng(seed)
        self.memory.memory[:] = draw.integers(0, 255, self.memory.memory.size, np.uint8)
        self.clock = rig.clock
        scratch = region(kind, SCRATCH, number=9)
        inner = rig.end()
        inner.register([scratch])
        self.end = FaultyTransport(inner, clock=rig.clock, odds=odds, scratch=scratch, seed=seed)
        self.end.register([self.memory])
        self.order = draw.permutation(PAGES)
        self.peer = 0
        self.pieces: dict[int, tuple[int, int, int]] = {}

    def send(self, layer: int, begin: int, end: int) -> None:
        mine = layer * PAGES + np.arange(begin, end)
        theirs = layer * PAGES + self.order[begin:end]
        local = pages(mine, UNIT)
        parts = views(local, {1: self.memory})
        told = Piece(
            *(UID, PieceKind.ROWS, layer, layer + 1, begin, end),
            *((end - begin) * UNIT, checksum(parts)),
        )
        note = SEAL.sealed(told, sender=self.end.epoch, receiver=self.peer)
        handle = self.end.post(
            Transfer(
                peer=self.peer,
                local=local,
                remote=pages(theirs, UNIT),
                notification=note,
                ticket=TICKET,
                within_s=5.0,
            )
        )
        self.pieces[handle] = layer, begin, end

    def poll(self) -> bool:
        """Whether the peer was lost."""
        is_lost = False
        for event in self.end.poll():
            is_lost |= isinstance(event, PeerLost)
            if isinstance(event, Failed):
                self.send(*self.pieces.pop(event.handle))
            if isinstance(event, Notification):
                again = SEAL.opened(event.content).message
                assert isinstance(again, Again)
                self.send(again.layer_begin, again.page_begin, again.page_end)
        return is_lost


class Receiver:
    def __init__(self, rig: Rig, sender: Sender) -> None:
        self.memory = region(rig.kind, (LAYERS * PAGES + 2) * UNIT)
        self.end = rig.end()
        self.end.register([self.memory])
        self.arrivals = Arrivals(clock=rig.clock)
        self.order = sender.order
        self.sender = sender.end.epoch
        self.garbled = 0
        share = Share(
            kind=PieceKind.ROWS, layer_begin=0, layer_end=LAYERS, page_count=PAGES, unit_bytes=UNIT
        )
        within_s = 1e9
        self.arrivals.expect(uid=UID, sender=self.sender, shares=[share], within_s=within_s)

    @property
    def is_complete(self) -> bool:
        arrival = self.arrivals.find(UID, sender=self.sender)
        assert arrival is not None
        return arrival.is_complete

    def read(self, piece: Piece) -> list[memoryview]:
        layers = range(piece.layer_begin, piece.layer_end)
        order = self.order[piece.page_begin : piece.page_end]
        return [
            part
            for layer in layers
            for part in views(pages(layer * PAGES + order, UNIT), {1: self.memory})
        ]

    def poll(self) -> None:
        for event in self.end.poll():
            if not isinstance(event, Notification):
                continue
            try:
                envelope = SEAL.opened(event.content)
            except BadInput:
                self.garbled += 1
                continue
            assert isinstance(envelope.message, Piece)
            self.arrivals.take(envelope.message, sender=envelope.sender, read=self.read)

    def ask_again(self) -> None:
        arrival = self.arrivals.find(UID, sender=self.sender)
        assert arrival is not None
        for again in arrival.missing():
            note = SEAL.sealed(again, sender=self.end.epoch, receiver=self.sender)
            self.end.post(Transfer(peer=self.sender, notification=note, within_s=5.0))


def hand_off(sender: Sender, receiver: Receiver, clock: ManualClock) -> None:
    """Until complete. `ask_again` stands for the receiver's patience running out."""
    for layer in range(LAYERS):
        for begin, end in ((0, 4), (4, 5), (5, PAGES)):
            sender.send(layer, begin, end)
    for number in range(ROUNDS_MAX):
        if sender.poll():
            join(sender.end, receiver.end)
        receiver.poll()
        if receiver.is_complete:
            return
        clock.advance(0.02)
        if number % 50 == 49:
            receiver.ask_again()
    raise AssertionError("not complete")


@pytest.fixture(params=["inprocess", "tcp", "shared", "nixl"])
def kind(request: pytest.FixtureRequest) -> str:
    require(request.param)
    return request.param


def test_what_is_complete_is_right_whatever_went_wrong(kind: str) -> None:
    injected: Counter[Fault] = Counter()
    for seed in range(40 if kind == "inprocess" else 8):
        clock = ManualClock()
        odds = ODDS if kind != "nixl" else ODDS | {Fault.CUT: 0.0}
        with rigged(kind, clock) as rig:
            sender = Sender(rig, odds=odds, seed=seed)
            receiver = Receiver(rig, sender)
            join(sender.end, receiver.end)
            sender.peer = receiver.end.epoch
            hand_off(sender, receiver, clock)
            injected += sender.end.injected
            got = receiver.memory.memory
            sent = sender.memory.memory.reshape(LAYERS, PAGES, UNIT)
            placed = got[: LAYERS * PAGES * UNIT].reshape(LAYERS, PAGES, UNIT)
            assert np.array_equal(placed[:, sender.order], sent), f"seed {seed}"
            assert (got[LAYERS * PAGES * UNIT :] == POISON).all()
            receiver.arrivals.check()
    assert all(injected[fault] >= 3 for fault, chance in odds.items() if chance), injected
