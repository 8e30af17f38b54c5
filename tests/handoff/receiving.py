"""A worker that receives through its port, and a peer that sends what a test tells it to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from ess.door import Offload
from ess.door import Sequence as Opened
from ess.door.handoff import geometry
from ess.door.handoff.endings import Landed, Missed
from ess.door.handoff.port import Port
from ess.layout import ModelLayout
from ess.transfer.messages import (
    Again,
    Count,
    Message,
    Piece,
    PieceKind,
    Reason,
    Release,
    Reserved,
    Seal,
    checksum,
)
from ess.transfer.runs import Region, Runs, byte_count, views
from ess.transfer.transport import Failed, Notification, Transfer, Transport
from ess.transfer.transports.inprocess import Exchange, InProcessTransport
from ess.transfer.transports.shared import SharedTransport
from ess.transfer.transports.tcp import TcpTransport
from ess.transfer.windows import packed_windows
from tests.handoff.layout import LAYOUT
from tests.support.manual_clock import ManualClock
from tests.support.manual_lane import ManualLane
from tests.transfer.rigs import identity

SEAL = Seal(b"a secret of sixteen bytes or more")
TOKENS = tuple(range(200))
WANTED = 4 * 4 + 3 * 4 + 1
GUARDED = ("inprocess", "tcp")
KINDS = ("inprocess", "tcp", "unguarded")
GUARD_S = 60.0
UID = 77
STATE_AT = 1 << 16
WAIT_S = 30.0


class Unguarded(InProcessTransport):
    """Bytes land whatever tickets say, as with one-sided hardware."""

    guards = False

    def forbid(self, ticket: int) -> None:
        pass


class Ends:
    """Transports of one kind that reach one another."""

    def __init__(self, kind: str, clock: ManualClock) -> None:
        self.kind = kind
        self.clock = clock
        self.exchange = Exchange()
        self.made: list[Transport] = []

    def end(self) -> Transport:
        who = replace(identity(), seal=SEAL)
        made: Transport
        if self.kind == "tcp":
            made = TcpTransport(who, clock=self.clock)
        elif self.kind == "shared":
            made = SharedTransport(who, clock=self.clock)
        else:
            form = Unguarded if self.kind == "unguarded" else InProcessTransport
            made = form(who, exchange=self.exchange, name=f"{who.epoch:x}", clock=self.clock)
        self.made.append(made)
        return made


def offload_of(
    layout: ModelLayout = LAYOUT, *, page_count: int = 24, shared: bool = False
) -> Offload:
    return Offload.create(
        layout,
        slot_bytes=8 * layout.chunk_bytes,
        host_bytes=page_count * layout.host_page_bytes,
        sequence_max=4,
        length_max=512 * layout.row_tokens,
        query_max=8,
        lane=ManualLane(seed=1),
        poison=True,
        shared=shared,
    )


def fill(sequence: Opened, seed: int) -> None:
    """Rows and keys of all tokens but the last, from the cached ones on, and what is beside."""
    layout, draw = sequence.owner.pools.layout, np.random.default_rng(seed)
    first, count = map(layout.rows_of, (sequence.cached_count, len(sequence.tokens) - 1))
    for layer in range(layout.layer_total):
        rows = draw.integers(0, 255, (count, layout.row_bytes), np.uint8)
        sequence.import_rows(layer, first, rows[first:])
    for group in layout.groups:
        keys = draw.integers(0, 255, (count, layout.index.key_bytes), np.uint8)
        sequence.import_keys(group[0], first, keys[first:])
    if layout.has_states:
        sequence.beside[:] = torch.from_numpy(draw.integers(0, 255, len(sequence.beside), np.uint8))
        sequence.reached(len(sequence.tokens) - 1)


def content(sequence: Opened) -> tuple[bytes, bytes]:
    """All rows and keys of all tokens but the last, as the host has them."""
    latent, layout = sequence.owner.pools.latent, sequence.owner.pools.layout
    rows = sequence.holding.host_rows(0, layout.rows_of(len(sequence.tokens) - 1))
    keys = [latent.keys.read(layer, rows) for layer in range(latent.keys.layer_count)]
    return latent.rows[:, rows].tobytes(), np.array(keys).tobytes()


def windows_of(token_count: int, layout: ModelLayout = LAYOUT) -> np.ndarray:
    draw = np.random.default_rng(token_count)
    shape = (layout.group_count, 4, layout.top_k)
    return draw.integers(-1, layout.rows_of(token_count), shape, dtype=np.int32)


class Peer:
    """Sends pages of a filled sequence of its own, when and as it is told to."""

    def __init__(self, transport: Transport, tokens: Sequence[int], layout: ModelLayout = LAYOUT):
        self.transport = transport
        self.offload = offload_of(layout)
        self.layout = layout
        self.sequence = self.offload.open(tokens)
        fill(self.sequence, seed=len(tokens))
        windows = windows_of(len(tokens) - 1, layout)
        self.packed = packed_windows(windows, layout.rows_of(len(tokens) - 1))
        memory = np.zeros(STATE_AT + layout.request_state_bytes(len(tokens) - 1), np.uint8)
        if layout.has_states:
            memory[STATE_AT:] = self.sequence.holding.state[: len(memory) - STATE_AT]
        listed = [*geometry.pool_regions(self.pools.latent), Region(geometry.PACKED, memory)]
        self.regions = {region.number: region for region in listed}
        transport.register(listed)
        self.peer = 0
        self.heard: list[Message] = []
        self.failed_count = 0

    @property
    def pools(self):
        return self.sequence.owner.pools

    @property
    def room(self) -> Reserved:
        return [message for message in self.heard if isinstance(message, Reserved)][-1]

    def of(self, form: type) -> list[Message]:
        return [message for message in self.heard if isinstance(message, form)]

    def poll(self) -> None:
        for event in self.transport.poll():
            if isinstance(event, Notification):
                self.heard.append(SEAL.opened(event.content).message)
            self.failed_count += isinstance(event, Failed)

    def say(self, message: Message, *, sender: int | None = None) -> None:
        frame = SEAL.sealed(message, sender=sender or self.transport.epoch, receiver=self.peer)
        self.transport.post(Transfer(peer=self.peer, notification=frame, within_s=WAIT_S))

    def tell_count(self, posted: int, *, uid: int = UID) -> None:
        self.say(Count(uid, posted, 1 << 20))

    def push(self, kind: PieceKind, layers: range, pages: range, room: Reserved) -> None:
        """Pages are numbers of the prompt."""
        mine = self.sequence.holding.host_pages[pages.start : pages.stop].astype(np.int64)
        begin, end = pages.start - room.first_page, pages.stop - room.first_page
        theirs = np.array(room.pages[begin:end], np.int64)
        local = geometry.unit_runs(
            self.layout, kind, layers, mine, self.pools.latent.pages.page_count
        )
        remote = geometry.unit_runs(self.layout, kind, layers, theirs, room.pool_pages)
        self._post(kind, layers, pages, local, remote, room)

    def push_windows(self, room: Reserved, packed: bytes | None = None) -> None:
        packed = self.packed if packed is None else packed
        self.regions[geometry.PACKED].memory[: len(packed)] = np.frombuffer(packed, np.uint8)
        local = np.array([[geometry.PACKED, 0, len(packed)]], np.int64)
        remote = np.array([[geometry.SLOTS, room.window_at, len(packed)]], np.int64)
        self._post(PieceKind.WINDOWS, range(1), range(1), local, remote, room)

    def push_state(self, room: Reserved, units: range | None = None) -> None:
        """As it lies in memory from `STATE_AT` on."""
        if units is None:
            units = range(geometry.state_units(self.layout, room.token_count))
        span = geometry.state_span(self.layout, room.token_count, units)
        size = span.stop - span.start
        local = np.array([[geometry.PACKED, STATE_AT + span.start, size]], np.int64)
        remote = geometry.slot_runs(self.layout, PieceKind.STATE, units, size, room)
        self._post(PieceKind.STATE, range(1), units, local, remote, room)

    def _post(
        self,
        kind: PieceKind,
        layers: range,
        pages: range,
        local: Runs,
        remote: Runs,
        room: Reserved,
    ) -> None:
        span = (layers.start, layers.stop, pages.start, pages.stop)
        made = checksum(views(local, self.regions))
        piece = Piece(room.uid, kind, *span, byte_count(local), made)
        self.transport.post(
            Transfer(
                peer=self.peer,
                local=local,
                remote=remote,
                notification=SEAL.sealed(piece, sender=self.transport.epoch, receiver=self.peer),
                ticket=room.ticket,
                within_s=WAIT_S,
            )
        )

    def pages(self, room: Reserved) -> range:
        return range(room.first_page, room.first_page + len(room.pages))

    def push_pages(self, room: Reserved) -> None:
        """All rows, then all keys."""
        if room.pages:
            for layer in range(self.layout.layer_total):
                self.push(PieceKind.ROWS, range(layer, layer + 1), self.pages(room), room)
            keys = range(self.layout.key_layer_count)
            self.push(PieceKind.INDEX_KEYS, keys, self.pages(room), room)

    def push_all(self, room: Reserved) -> None:
        self.push_pages(room)
        self.push_windows(room)
        if self.layout.has_states:
            self.push_state(room)

    def serve(self, again: Again) -> None:
        """What it asks for, once more."""
        layers, pages = (
            range(again.layer_begin, again.layer_end),
            range(again.page_begin, again.page_end),
        )
        if again.kind is PieceKind.WINDOWS:
            self.push_windows(self.room)
        elif again.kind is PieceKind.STATE:
            self.push_state(self.room, pages)
        else:
            self.push(again.kind, layers, pages, self.room)

    def release(self, reason: Reason, *, uid: int = UID) -> None:
        self.say(Release(uid, reason))


class Pair:
    """The worker under test and its peer, who have met."""

    def __init__(self, kind: str, tokens: Sequence[int], layout: ModelLayout, **more) -> None:
        self.clock = ManualClock()
        self.ends = Ends(kind, self.clock)
        self.offload = offload_of(layout)
        transport = self.ends.end()
        self.port = Port(self.offload, transport, SEAL, clock=self.clock, **more)
        self.peer = Peer(self.ends.end(), tokens, layout)
        self.peer.peer = self.peer.transport.connect(self.port.metadata())
        assert self.port.meet(self.peer.transport.metadata()) == self.peer.transport.epoch
        self.outcomes: list[Landed | Missed] = []

    @property
    def receiver(self):
        return self.port.receiver

    def open(self, tokens: Sequence[int], **more) -> Opened:
        return self.offload.open(list(tokens), on_device=False, **more)

    def expect(self, sequence: Opened, *, uid: int = UID) -> Reserved:
        """The room as the peer has heard of it."""
        self.receiver.expect(sequence, uid=uid, peer=self.peer.transport.epoch)
        self.turn(lambda: uid in [room.uid for room in self.peer.of(Reserved)])
        return self.peer.room

    def turn(self, until: Callable[[], bool], *, polls: bool = True) -> None:
        """Both sides move until something is true; the guard only ends a hung test."""
        guard_s = time.monotonic() + GUARD_S
        while not until():
            assert time.monotonic() < guard_s, f"nothing more has happened: {self.peer.heard}"
            self.step(polls=polls)

    def step(self, *, polls: bool = True) -> None:
        if polls:
            self.peer.poll()
        self.port.pump()
        self.port.check()
        self.outcomes += self.receiver.outcomes()

    def settle(self) -> None:
        """What is under way has come."""
        for _ in range(20):
            self.step()

    def ended(self) -> Landed | Missed:
        self.turn(lambda: bool(self.outcomes))
        (outcome,) = self.outcomes
        self.outcomes.clear()
        return outcome

    def finish(self) -> Landed | Missed:
        """The outcome, of a peer that answers that nothing is under way."""
        if not self.peer.transport.guards:
            self.turn(lambda: bool(self.peer.of(Release)))
            self.peer.release(Reason.SETTLED)
        return self.ended()

    @property
    def free_count(self) -> int:
        return self.offload._pools.latent.free_count

    def check(self) -> None:
        self.port.check()
        self.offload.check()

    def close(self) -> None:
        self.port.close()
        self.port.check()
        self.peer.transport.close()
        self.offload.check()


@contextmanager
def paired(
    kind: str, tokens: Sequence[int] = tuple(range(200)), layout: ModelLayout = LAYOUT, **more
) -> Iterator[Pair]:
    pair = Pair(kind, tokens, layout, **more)
    try:
        yield pair
    finally:
        pair.close()
