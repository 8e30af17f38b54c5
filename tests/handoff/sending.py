"""A sender with true pools, and a scripted receiver that checks what lands in its memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from ess.door import Offload
from ess.door.handoff import geometry
from ess.door.handoff.endings import Sent
from ess.door.handoff.port import Port
from ess.errors import BadInput
from ess.flashtrans.lanes import InlineLane
from ess.transfer.messages import (
    Again,
    Message,
    Piece,
    PieceKind,
    Reason,
    Release,
    Reserved,
    checksum,
    text_digest,
)
from ess.transfer.runs import Region
from ess.transfer.transport import Notification, Transfer, Transport
from ess.transfer.windows import unpacked_windows
from ess.units import PAGE_ROWS, div_ceil
from tests.handoff.layout import LAYOUT
from tests.support.manual_clock import ManualClock
from tests.transfer.rigs import SEAL, Rig, join

LAYERS = LAYOUT.layer_total
KEY_LAYERS = LAYOUT.key_layer_count
POOL_PAGES = 23
WINDOW_AT = 4096
UID = 77
GUARD_S = 60.0
WANTED = 5 * (LAYERS + KEY_LAYERS) + 1
"""Units of PROMPT: four full pages and one of 44 rows, of each layer, and the windows."""


def prompt_of(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, count).tolist()


PROMPT = prompt_of(301)


@dataclass
class Receiver:
    """The other worker: its memory begins as poison, what lands is noted in order."""

    end: Transport
    sender: int
    pieces: list[Piece] = field(default_factory=list)
    heard: list[Message] = field(default_factory=list)
    rooms: dict[int, Reserved] = field(default_factory=dict)

    def __post_init__(self) -> None:
        codec = LAYOUT.index
        assert codec is not None
        self.rows = np.full((LAYERS, POOL_PAGES, LAYOUT.page_bytes), 0xFF, np.uint8)
        self.keys = np.full((KEY_LAYERS, POOL_PAGES, codec.page_bytes), 0xFF, np.uint8)
        self.windows = np.full(1 << 16, 0xFF, np.uint8)
        places = ((geometry.ROWS, self.rows), (geometry.KEYS, self.keys))
        regions = [Region(number, memory.reshape(-1)) for number, memory in places]
        self.end.register([*regions, Region(geometry.SLOTS, self.windows)])

    def room(self, prompt: list[int], uid: int = UID, first_page: int = 0) -> Reserved:
        page_count = div_ceil(len(prompt) - 1, PAGE_ROWS)
        pages = random.Random(uid).sample(range(POOL_PAGES), page_count - first_page)
        text = text_digest(prompt[:-1], b"")
        size = len(prompt) - 1
        places = (first_page, POOL_PAGES, WINDOW_AT, tuple(pages))
        return Reserved(uid, uid, size, text, *places)

    def reserve(self, prompt: list[int], uid: int = UID, first_page: int = 0) -> Reserved:
        message = self.room(prompt, uid, first_page)
        self.rooms[uid] = message
        self.end.allow(uid)
        self.say(message)
        return message

    def say(self, message: Message) -> None:
        note = SEAL.sealed(message, sender=self.end.epoch, receiver=self.sender)
        self.end.post(Transfer(peer=self.sender, notification=note, within_s=30.0))

    def poll(self) -> None:
        for event in self.end.poll():
            if isinstance(event, Notification):
                self.note(event.content)

    def note(self, content: bytes) -> None:
        try:
            message = SEAL.opened(content).message
        except BadInput:
            return
        (self.pieces if isinstance(message, Piece) else self.heard).append(message)

    def of(self, form: type, uid: int = UID) -> list:
        return [each for each in self.heard if isinstance(each, form) and each.uid == uid]

    def units(self, kind: PieceKind, uid: int = UID) -> list[tuple[int, int]]:
        """(layer, page) as often as it has come."""
        return [
            (layer, page)
            for piece in self.pieces
            if piece.kind is kind and piece.uid == uid
            for layer in range(piece.layer_begin, piece.layer_end)
            for page in range(piece.page_begin, piece.page_end)
        ]

    def lies(self, piece: Piece) -> bytes:
        room = self.rooms[piece.uid]
        if piece.kind is PieceKind.WINDOWS:
            return self.windows[WINDOW_AT : WINDOW_AT + piece.byte_count].tobytes()
        memory = self.rows if piece.kind is PieceKind.ROWS else self.keys
        pages = room.pages[piece.page_begin - room.first_page : piece.page_end - room.first_page]
        return memory[piece.layer_begin : piece.layer_end, list(pages)].tobytes()

    def has_all(self, uid: int = UID) -> bool:
        page_count = div_ceil(self.rooms[uid].token_count, PAGE_ROWS)
        first = self.rooms[uid].first_page
        pages = range(first, page_count)
        return (
            set(self.units(PieceKind.ROWS, uid))
            == {(layer, page) for layer in range(LAYERS) for page in pages}
            and set(self.units(PieceKind.INDEX_KEYS, uid))
            == {(layer, page) for layer in range(KEY_LAYERS) for page in pages}
            and self.units(PieceKind.WINDOWS, uid) == [(0, 0)]
        )


class World:
    """A sender and a receiver, joined by a transport, with a clock that only the test advances."""

    def __init__(self, kind: str, **settings) -> None:
        self.clock = ManualClock()
        self.rig = Rig(kind, self.clock)
        self.offload = Offload.create(
            LAYOUT,
            slot_bytes=LAYOUT.group_count * LAYOUT.chunk_bytes,
            host_bytes=24 * LAYOUT.host_page_bytes,
            sequence_max=4,
            length_max=1024,
            lane=InlineLane(),
            poison=True,
        )
        self.latent = self.offload._pools.latent
        self.end, other = self.rig.end(), self.rig.end()
        self.port = Port(self.offload, self.end, SEAL, clock=self.clock, arrivals_max=1, **settings)
        self.sender = self.port.sender
        self.receiver = Receiver(other, self.end.epoch)
        join(self.end, other)
        self.checks = True

    def open(self, prompt: list[int], uid: int = UID):
        sequence = self.offload.open(prompt)
        self.sender.offer(uid, sequence, prompt=prompt, salt=b"")
        return sequence

    def make(self, sequence, layer: int, start: int, stop: int) -> None:
        """Rows and keys of a layer of a chunk are stored; the sender is not told."""
        rng = np.random.default_rng((layer, start))
        sequence.import_rows(layer, start, rng.integers(0, 255, (stop - start, 16), np.uint8))
        if LAYOUT.place_of(layer)[1] == 0:
            keys = rng.integers(0, 255, (stop - start, 12), np.uint8)
            sequence.import_keys(layer, start, keys)

    def chunk(self, sequence, start: int, stop: int, uid: int = UID) -> None:
        for layer in range(LAYERS):
            self.make(sequence, layer, start, stop)
            self.sender.made(uid, layer, stop)

    def whole(self, prompt: list[int], uid: int = UID):
        """A prompt that is made and handed to the sender."""
        sequence = self.open(prompt, uid)
        self.chunk(sequence, sequence.cached_count, len(prompt) - 1, uid)
        self.sender.finish(uid, self.windows_of(prompt))
        return sequence

    def windows_of(self, prompt: list[int]) -> np.ndarray:
        shape = (LAYOUT.group_count, 4, 8)
        return np.random.default_rng(9).integers(-1, len(prompt) - 1, shape, np.int32)

    def round(self) -> None:
        self.port.pump()
        self.receiver.poll()
        if self.checks:
            self.port.check()

    def until(self, condition: Callable[[], bool]) -> None:
        """Rounds until it is so; the guard only ends a hung test."""
        guard_s = time.monotonic() + GUARD_S
        while not condition():
            assert time.monotonic() < guard_s, (self.receiver.pieces, self.receiver.heard)
            self.round()

    def round_lossy(self) -> None:
        """A round in time that goes on."""
        self.clock.advance(0.3)
        self.round()

    def lacking(self) -> list[Again]:
        """What has not come as its piece says, page by page."""
        good: set[tuple[PieceKind, int, int]] = set()
        receiver = self.receiver
        for piece in receiver.pieces:
            is_right = checksum([receiver.lies(piece)]) == piece.checksum
            for layer in range(piece.layer_begin, piece.layer_end):
                for page in range(piece.page_begin, piece.page_end):
                    unit = piece.kind, layer, page
                    (good.add if is_right else good.discard)(unit)
        pages = range(div_ceil(receiver.rooms[UID].token_count, PAGE_ROWS))
        wanted = [(PieceKind.ROWS, n, p) for n in range(LAYERS) for p in pages]
        wanted += [(PieceKind.INDEX_KEYS, n, p) for n in range(KEY_LAYERS) for p in pages]
        wanted += [(PieceKind.WINDOWS, 0, 0)]
        return [Again(UID, k, n, n + 1, p, p + 1) for k, n, p in wanted if (k, n, p) not in good]

    def settle(self) -> None:
        """Rounds until nothing moves any more: only for a transport within the process."""
        assert self.rig.kind in ("inprocess", "faulty")
        for _ in range(12):
            self.round()

    def done(self, uid: int = UID) -> None:
        self.receiver.say(Release(uid, Reason.DONE))

    def same_rows(self, host_pages: np.ndarray) -> None:
        """The receiver has the sender's rows, keys and windows, each in its place."""
        room = self.receiver.rooms[UID]
        rows = self.latent.rows.reshape(LAYERS, -1, LAYOUT.page_bytes)
        mine = host_pages[room.first_page : room.first_page + len(room.pages)]
        there = list(room.pages)
        assert np.array_equal(self.receiver.rows[:, there], rows[:, mine])
        assert np.array_equal(self.receiver.keys[:, there], self.latent.keys.pages[:, mine])
        others = [page for page in range(POOL_PAGES) if page not in there]
        assert (self.receiver.rows[:, others] == 0xFF).all(), "a row fell beside its page"

    def same_windows(self, prompt: list[int], uid: int = UID) -> None:
        piece = next(p for p in self.receiver.pieces if p.kind is PieceKind.WINDOWS)
        sets, count = unpacked_windows(
            self.receiver.lies(piece), group_count=LAYOUT.group_count, length=len(prompt) - 1
        )
        assert count == 4
        for (positions, _), group in zip(sets, self.windows_of(prompt), strict=True):
            assert positions.tolist() == sorted({p for p in group.flatten().tolist() if p >= 0})

    def close(self) -> None:
        self.sender.close()
        self.rig.close()
        self.offload.close()


@contextmanager
def world(kind: str = "inprocess", **settings) -> Iterator[World]:
    made = World(kind, **settings)
    try:
        yield made
        made.sender.check()
        made.offload.check()
    finally:
        made.close()


def landed(made: World, prompt: list[int] = PROMPT, uid: int = UID) -> None:
    """All has come and is right; the receiver says so, and the sequence is gone."""
    receiver = made.receiver
    made.until(lambda: receiver.has_all(uid))
    for piece in receiver.pieces:
        if piece.uid == uid:
            assert checksum([receiver.lies(piece)]) == piece.checksum
    made.done(uid)
    ended: list = []
    made.until(lambda: bool(ended.extend(made.sender.outcomes()) or ended))
    assert [(type(each), each.uid) for each in ended] == [(Sent, uid)]
    made.until(lambda: not len(made.sender))
