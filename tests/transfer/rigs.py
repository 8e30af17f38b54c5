"""Two workers' ends of a transport, of any kind, and the loop that lets them talk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from ess.clock import Clock
from ess.errors import Unavailable
from ess.transfer.endpoint import SILENT_S, Identity
from ess.transfer.messages import Seal, new_epoch
from ess.transfer.runs import Region, page_runs
from ess.transfer.transport import Event, Transfer, Transport
from ess.transfer.transports.faulty import Fault, FaultyTransport
from ess.transfer.transports.inprocess import Exchange, InProcessTransport
from ess.transfer.transports.nixl import NixlTransport, nixl_api
from ess.transfer.transports.shared import SharedTransport, shared_region
from ess.transfer.transports.tcp import TcpTransport
from tests.support.manual_clock import ManualClock

SEAL = Seal(b"a secret of sixteen bytes or more")
LAYOUT = bytes(range(32))
POISON = 0xFF
TICKET = 1
"""All ends of a rig allow it."""
GUARD_S = 60.0
SCRATCH = 60_000

KINDS = ("inprocess", "tcp", "shared", "nixl", "faulty")
PROCESS_KINDS = ("tcp", "shared", "nixl")


def require(kind: str) -> None:
    if kind == "nixl":
        try:
            nixl_api()
        except Unavailable as missing:
            pytest.skip(str(missing))


def identity(*, layout: bytes = LAYOUT, seal: Seal = SEAL, silent_s: float = SILENT_S) -> Identity:
    return Identity(epoch=new_epoch(), seal=seal, layout=layout, silent_s=silent_s)


def region(kind: str, size: int, *, number: int = 1, fill: int = POISON) -> Region:
    made = shared_region(number, size) if kind == "shared" else Region(number, np.empty(size, "u1"))
    made.memory[:] = fill
    return made


@dataclass
class Rig:
    """Builds ends that can reach one another, and closes them."""

    kind: str
    clock: Clock = field(default_factory=ManualClock)
    exchange: Exchange = field(default_factory=Exchange)
    ends: list[Transport] = field(default_factory=list)

    def end(self, who: Identity | None = None, *, name: str = "", port: int = 0) -> Transport:
        who = who or identity()
        name = name or f"{who.epoch:x}"
        made: Transport
        match self.kind:
            case "inprocess" | "faulty":
                made = InProcessTransport(who, exchange=self.exchange, name=name, clock=self.clock)
            case "tcp":
                made = TcpTransport(who, port=port, clock=self.clock)
            case "shared":
                made = SharedTransport(who, clock=self.clock)
            case _:
                made = NixlTransport(who, clock=self.clock)
        if self.kind == "faulty":
            scratch = region(self.kind, SCRATCH, number=9)
            odds: dict[Fault, float] = {}
            made = FaultyTransport(made, clock=self.clock, odds=odds, scratch=scratch, seed=0)
        made.allow(TICKET)
        self.ends.append(made)
        return made

    def pair(self, size: int) -> tuple[Transport, Transport, Region, Region]:
        """A sender with random bytes and a receiver with poison, connected both ways."""
        local, remote = region(self.kind, size), region(self.kind, size)
        local.memory[:] = np.random.default_rng(size).integers(0, 255, size, dtype=np.uint8)
        ends = self.end(), self.end()
        for end, memory in zip(ends, (local, remote), strict=True):
            end.register([memory])
        join(*ends)
        return *ends, local, remote

    def close(self) -> None:
        for end in self.ends:
            end.close()


@contextmanager
def rigged(kind: str, clock: Clock | None = None) -> Iterator[Rig]:
    require(kind)
    rig = Rig(kind, clock or ManualClock())
    try:
        yield rig
    finally:
        rig.close()


def join(one_end: Transport, other_end: Transport) -> None:
    one_end.connect(other_end.metadata())
    other_end.connect(one_end.metadata())


def pump(
    ends: Sequence[Transport], until: Callable[[list[list[Event]]], bool]
) -> list[list[Event]]:
    """Polls all ends in turn until the events satisfy; the guard only ends a hung test."""
    seen: list[list[Event]] = [[] for _ in ends]
    guard_s = time.monotonic() + GUARD_S
    while not until(seen):
        assert time.monotonic() < guard_s, f"nothing more has happened: {seen}"
        for events, end in zip(seen, ends, strict=True):
            events += end.poll()
    return seen


def heard(end_number: int, form: type) -> Callable[[list[list[Event]]], bool]:
    """Until that end has seen an event of this form."""
    return lambda seen: any(isinstance(event, form) for event in seen[end_number])


def pages(numbers: Sequence[int] | NDArray[np.int64], size: int):
    return page_runs(1, np.asarray(numbers, np.int64), page_bytes=size)


def write(
    peer: int, local: Sequence[int], remote: Sequence[int], size: int, *, note: bytes = b"n", **more
) -> Transfer:
    more = {"within_s": 30.0, "ticket": TICKET, **more}
    return Transfer(
        peer=peer, local=pages(local, size), remote=pages(remote, size), notification=note, **more
    )
