"""Pages of a prompt go from one worker to another over a network that loses and alters them.

The sender pushes a layer at a time; the receiver takes what its own count and the checksums allow,
asks for the rest again, and is done when nothing is missing.

    python docs/examples/handoff.py
"""

from __future__ import annotations

import numpy as np

from ess import ModelLayout
from ess.clock import RealClock
from ess.errors import BadInput
from ess.transfer.arrivals import Arrivals, Share
from ess.transfer.endpoint import Identity
from ess.transfer.faulty import Fault, FaultyTransport
from ess.transfer.messages import Again, Piece, PieceKind, Seal, checksum, layout_hash, new_epoch
from ess.transfer.runs import Region, page_runs, views
from ess.transfer.tcp import TcpTransport
from ess.transfer.transport import Notification, Transfer

LAYOUT = ModelLayout.embedded()
SEAL = Seal(b"both workers were started with it")
PAGES = np.array([17, 3, 4, 5, 11, 0, 19])  # where the receiver has room: pages of its host pool
POOL_PAGES = 20
UID = 1
WITHIN_S = 10.0


def worker() -> TcpTransport:
    who = Identity(epoch=new_epoch(), seal=SEAL, layout=layout_hash(LAYOUT))
    return TcpTransport(who)


def unreliable(inner: TcpTransport) -> FaultyTransport:
    scratch = Region(9, np.zeros(POOL_PAGES * LAYOUT.page_bytes, np.uint8))
    inner.register([scratch])
    odds = {Fault.CORRUPT: 0.2, Fault.GARBLE: 0.2, Fault.DUPLICATE: 0.2, Fault.DELAY: 0.2}
    return FaultyTransport(inner, clock=RealClock(), odds=odds, scratch=scratch, seed=0)


def pool(pages_of_a_layer: int) -> Region:
    size = LAYOUT.layer_count * pages_of_a_layer * LAYOUT.page_bytes
    return Region(1, np.zeros(size, np.uint8))


def runs(layer: int, pages: np.ndarray, pages_of_a_layer: int) -> np.ndarray:
    return page_runs(1, layer * pages_of_a_layer + pages, page_bytes=LAYOUT.page_bytes)


def push(end: FaultyTransport, memory: Region, peer: int, layer: int, pages: range) -> None:
    here = runs(layer, np.array(pages), len(PAGES))
    size = len(pages) * LAYOUT.page_bytes
    made = checksum(views(here, {1: memory}))
    piece = Piece(
        *(UID, PieceKind.ROWS, layer, layer + 1, pages.start, pages.stop, size, made),
    )
    end.post(
        Transfer(
            peer=peer,
            here=here,
            there=runs(layer, PAGES[pages.start : pages.stop], POOL_PAGES),
            notification=SEAL.sealed(piece, sender=end.epoch, receiver=peer),
            ticket=UID,
            within_s=WITHIN_S,
        )
    )


class Receiver:
    """The decode worker's side: room for one request, and the count of what has come."""

    def __init__(self, end: TcpTransport, sender: int) -> None:
        self.end = end
        self.sender = sender
        self.memory = pool(POOL_PAGES)
        end.register([self.memory])
        self.arrivals = Arrivals(clock=RealClock())
        share = Share(
            kind=PieceKind.ROWS,
            layer_begin=0,
            layer_end=LAYOUT.layer_count,
            page_count=len(PAGES),
            unit_bytes=LAYOUT.page_bytes,
        )
        self.arrivals.expect(uid=UID, sender=sender, shares=[share], within_s=WITHIN_S)
        handoff = self.arrivals.find(UID, sender=sender)
        assert handoff is not None
        self.handoff = handoff
        end.allow(UID)

    def read(self, piece: Piece) -> list[memoryview]:
        pages = PAGES[piece.page_begin : piece.page_end]
        return views(runs(piece.layer_begin, pages, POOL_PAGES), {1: self.memory})

    def poll(self) -> None:
        for event in self.end.poll():
            if not isinstance(event, Notification):
                continue
            try:
                envelope = SEAL.opened(event.content)
            except BadInput:
                continue
            if isinstance(envelope.message, Piece):
                self.arrivals.take(envelope.message, sender=envelope.sender, read=self.read)

    def ask_again(self) -> None:
        for again in self.handoff.missing():
            note = SEAL.sealed(again, sender=self.end.epoch, receiver=self.sender)
            self.end.post(Transfer(peer=self.sender, notification=note, within_s=WITHIN_S))


def answer(prefill: FaultyTransport, rows: Region) -> None:
    """The prefill worker's side, after it has pushed everything once."""
    for event in prefill.poll():
        if isinstance(event, Notification):
            envelope = SEAL.opened(event.content)
            again = envelope.message
            assert isinstance(again, Again)
            pages = range(again.page_begin, again.page_end)
            for layer in range(again.layer_begin, again.layer_end):
                push(prefill, rows, envelope.sender, layer, pages)


def report(prefill: FaultyTransport, receiver: Receiver) -> None:
    faults = {fault.value: count for fault, count in prefill.injected.items()}
    verdicts = {verdict.value: count for verdict, count in receiver.arrivals.verdicts.items()}
    count = receiver.handoff.count
    print(f"{count.arrived} of {count.wanted} pages of a layer arrived, all right")
    print(f"the network did: {faults}")
    print(f"the receiver said: {verdicts}")


def main() -> None:
    prefill, decode = unreliable(worker()), worker()
    rows = pool(len(PAGES))
    rows.memory[:] = np.random.default_rng(0).integers(0, 256, rows.memory.size, np.uint8)
    prefill.register([rows])
    receiver = Receiver(decode, prefill.epoch)
    prefill.connect(decode.metadata())
    decode.connect(prefill.metadata())

    for layer in range(LAYOUT.layer_count):
        push(prefill, rows, decode.epoch, layer, range(len(PAGES)))
    polls = 0
    while not receiver.handoff.is_complete and not receiver.arrivals.expired():
        polls += 1
        answer(prefill, rows)
        receiver.poll()
        if polls % 500 == 0:
            receiver.ask_again()
    decode.forbid(UID)

    came = receiver.memory.memory.reshape(LAYOUT.layer_count, POOL_PAGES, -1)[:, PAGES]
    assert np.array_equal(came.reshape(-1), rows.memory)
    report(prefill, receiver)
    prefill.close()
    decode.close()


if __name__ == "__main__":
    main()
