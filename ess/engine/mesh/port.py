"""Handoffs to an engine of several processes: rows go to rank 0, and all processes land them.

Rank 0 has the only transport. It has mapped the host pool of all stages, so a prefill worker sees
one decode worker with all layers, whose pool lies in one piece: nothing on the wire is new. Rank 0
tells the others what follows from a handoff, at points that the calls alone determine:

    expect     whether rank 0 has room for it and knows the peer; then all hold the same pages
    outcomes   which handoffs have ended, and how; all mark the rows as there, and drop the pages

Bytes may come at any time, into pages that no rank has marked; rank 0 speaks of them only when they
have come. Where stages have disks, all ranks have taken these pages before (`clear_pages`): a stage
behind rank 0 would else store some of these bytes as what such a page held until then.

An end that rank 0 sees between two layers waits for the next `outcomes` (`Receiver.conclude`).
While no handoff is awaited, nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NoReturn
from zlib import crc32

import numpy as np

from ess.array_types import PageIds
from ess.comm.experts.expert_ranks import OutOfStep
from ess.door import Sequence
from ess.door.handoff.endings import Landed, Lapsed, Missed, Sent, Timeline
from ess.door.handoff.incoming.receiver import Receiver, awaited_count, awaited_pages, land
from ess.door.handoff.port import Port
from ess.engine.handoff import Arrivals
from ess.engine.mesh.lockstep import Lockstep
from ess.engine.mesh.words import End, Full, HandoffRoom, HandoffsEnded
from ess.errors import BadInput, PoolFull
from ess.layout import ModelLayout
from ess.pool.warmup import WindowSet

NO_TIME: Final = Timeline(0.0, ())


class LeadPort:
    """The port of rank 0."""

    def __init__(self, port: Port, lockstep: Lockstep) -> None:
        self.sender = port.sender
        self.receiver: Arrivals = LeadArrivals(port.receiver, lockstep)
        self._port = port

    @property
    def awaits(self) -> bool:
        return len(self._port.receiver) > 0

    @property
    def is_busy(self) -> bool:
        return self._port.is_busy

    @property
    def now_s(self) -> float:
        return self._port.now_s

    def pump(self) -> None:
        self._port.pump()


class LeadArrivals:
    def __init__(self, receiver: Receiver, lockstep: Lockstep) -> None:
        self._receiver = receiver
        self._lockstep = lockstep

    def expect(self, sequence: Sequence, *, uid: int, peer: int) -> None:
        self._lockstep.clear_pages()
        try:
            self._receiver.expect(sequence, uid=uid, peer=peer)
        except PoolFull as full:
            numbers = Full(full.limiter, full.needed, full.free)
            self._lockstep.pass_on(HandoffRoom(uid, fault=str(full), full=numbers))
            raise
        except BadInput as fault:
            self._lockstep.pass_on(HandoffRoom(uid, fault=str(fault)))
            raise
        self._lockstep.pass_on(HandoffRoom(uid, _digest(awaited_pages(sequence))))

    def give_up(self, uid: int) -> None:
        self._receiver.give_up(uid)

    def outcomes(self) -> list[Landed | Missed]:
        if not len(self._receiver):
            return []
        ended = self._receiver.conclude()
        outcomes = {outcome.uid: outcome for outcome in self._receiver.outcomes()}
        self._lockstep.pass_on(
            HandoffsEnded(tuple(_end(e.uid, outcomes.get(e.uid)) for e in ended))
        )
        self._lockstep.latent.say()
        return [_own(outcome, self._lockstep.layout) for outcome in outcomes.values()]


@dataclass(frozen=True, slots=True, eq=False)
class Awaited:
    sequence: Sequence
    pages: PageIds
    row_count: int


class EchoPort:
    """The port of ranks other than 0: it moves no bytes."""

    is_busy = False
    now_s = 0.0

    def __init__(self, lockstep: Lockstep) -> None:
        self.receiver: Arrivals = EchoArrivals(lockstep)
        self.sender = NoDepartures()

    def pump(self) -> None:
        return


class NoDepartures:
    """An engine of several processes gives no rows: it refuses the request."""

    def outcomes(self) -> list[Sent | Lapsed]:
        return []

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"{name}: rows leave a rank that has no transport")


class EchoArrivals:
    """Does what rank 0 says; a handoff that is given up is awaited until rank 0 is done with it."""

    def __init__(self, lockstep: Lockstep) -> None:
        self._lockstep = lockstep
        self._awaited: dict[int, Awaited] = {}

    def expect(self, sequence: Sequence, *, uid: int, peer: int) -> None:
        self._lockstep.clear_pages()
        room, pages = self._lockstep.passed(HandoffRoom), awaited_pages(sequence)
        if room.full is not None:
            raise PoolFull(
                limiter=room.full.limiter,
                needed=room.full.needed,
                free=room.full.free,
                sentence=room.fault,
            )
        if room.fault:
            raise BadInput(room.fault)
        if (room.uid, room.pages) != (uid, _digest(pages)):
            raise OutOfStep(f"rank 0 awaits handoff {room.uid} on other pages than {uid} has here")
        self._lockstep.latent.hold(pages)
        self._awaited[uid] = Awaited(sequence, pages, awaited_count(sequence))

    def give_up(self, uid: int) -> None:
        return

    def outcomes(self) -> list[Landed | Missed]:
        if not self._awaited:
            return []
        outcomes = [self._ended(end) for end in self._lockstep.passed(HandoffsEnded).ends]
        self._lockstep.latent.say()
        return [outcome for outcome in outcomes if outcome is not None]

    def _ended(self, end: End) -> Landed | Missed | None:
        if end.uid not in self._awaited:
            raise OutOfStep(f"handoff {end.uid} has ended, and is not awaited here")
        awaited, latent = self._awaited.pop(end.uid), self._lockstep.latent
        outcome: Landed | Missed | None = None
        if end.has_landed:
            land(latent, awaited.sequence, awaited.pages, awaited.row_count)
            landed = Landed(end.uid, (list(map(_set, end.windows)), end.window_count), NO_TIME)
            outcome = _own(landed, self._lockstep.layout)
        elif end.fault:
            outcome = Missed(end.uid, end.fault, NO_TIME)
        latent.drop(awaited.pages)
        return outcome


def _end(uid: int, outcome: Landed | Missed | None) -> End:
    """Without an outcome it was given up, and no rank waits for it."""
    match outcome:
        case Landed(windows=(sets, count)):
            packed = tuple((at.tobytes(), last.tobytes()) for at, last in sets)
            return End(uid, has_landed=True, windows=packed, window_count=count)
        case Missed(sentence=sentence):
            return End(uid, fault=sentence)
    return End(uid)


def _own(outcome: Landed | Missed, part: ModelLayout) -> Landed | Missed:
    """The same outcome, with the windows of this rank's layer groups."""
    if isinstance(outcome, Missed):
        return outcome
    sets, count = outcome.windows
    mine = sets[part.first_group : part.first_group + part.group_count]
    return replace(outcome, windows=(mine, count))


def _set(packed: tuple[bytes, bytes]) -> WindowSet:
    at, last = (np.frombuffer(each, np.int32) for each in packed)
    return at, last


def _digest(pages: PageIds) -> int:
    return crc32(pages.tobytes())
