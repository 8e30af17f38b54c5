"""The common part of all transports: our identity, transfers under way, events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ess.clock import Clock, RealClock
from ess.errors import BadInput, BadState
from ess.transfer.messages import FRAME_BYTES_MAX, NONCE_BYTES, Envelope, Hello, Seal
from ess.transfer.runs import RUNS_MAX, Region, Runs, fault_of, merged
from ess.transfer.transport import (
    Completed,
    Event,
    Failed,
    Notification,
    PeerLost,
    Transfer,
)
from ess.units import PAGE_ROWS

NO_NONCE: Final = bytes(NONCE_BYTES)
HEARTBEAT_S: Final = 1.0
SILENT_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """This boot of this worker, the secret that it shares with its peers, and for how long they may
    send nothing before they count as lost."""

    epoch: int
    seal: Seal
    layout: bytes
    page_rows: int = PAGE_ROWS
    silent_s: float = SILENT_S

    def hello(
        self,
        *,
        to: int = 0,
        nonce: bytes = NO_NONCE,
        answer: bytes = NO_NONCE,
        address: bytes = b"",
    ) -> bytes:
        message = Hello(self.layout, self.page_rows, nonce, answer, address)
        return self.seal.sealed(message, sender=self.epoch, receiver=to)

    def greeted(self, frame: bytes | memoryview) -> tuple[Envelope, Hello]:
        """The Hello in a frame; BadInput unless its sender may exchange rows with us."""
        envelope = self.seal.opened(frame)
        hello = envelope.message
        if not isinstance(hello, Hello):
            raise BadInput(f"a Hello was due, a {type(hello).__name__} came")
        if hello.layout != self.layout:
            raise BadInput(
                f"peer {envelope.sender:016x} has layout {hello.layout.hex()[:16]}, "
                f"we have {self.layout.hex()[:16]}: another model, other rows or states, "
                "or weights, or one is deterministic and the other is not, or is of another "
                "release or has other instructions"
            )
        if envelope.receiver not in (0, self.epoch) or envelope.sender in (0, self.epoch):
            raise BadInput(f"a Hello from {envelope.sender:016x} to {envelope.receiver:016x}")
        return envelope, hello


@dataclass(slots=True)
class Underway:
    """Transfers that are not over. Each leaves once, with the one event that ends it."""

    clock: Clock
    _begun_count: int = 0
    _open: dict[int, tuple[Transfer, float]] = field(default_factory=dict)
    _events: list[Event] = field(default_factory=list)

    def begin(self, transfer: Transfer) -> int:
        self._begun_count += 1
        self._open[self._begun_count] = transfer, self.clock.now_s() + transfer.within_s
        return self._begun_count

    def find(self, handle: int) -> Transfer | None:
        entry = self._open.get(handle)
        return None if entry is None else entry[0]

    def complete(self, handle: int) -> None:
        if self._open.pop(handle, None) is not None:
            self._events.append(Completed(handle))

    def fail(self, handle: int, reason: str) -> None:
        if self._open.pop(handle, None) is not None:
            self._events.append(Failed(handle, reason))

    def late(self) -> list[tuple[int, Transfer]]:
        now_s, opened = self.clock.now_s(), self._open.items()
        return [(handle, transfer) for handle, (transfer, end_s) in opened if end_s <= now_s]

    def of_peer(self, peer: int) -> list[int]:
        return [handle for handle, (each, _) in self._open.items() if each.peer == peer]

    def notified(self, peer: int, content: bytes) -> None:
        self._events.append(Notification(peer, content))

    def lost(self, peer: int, reason: str) -> None:
        for handle in self.of_peer(peer):
            self.fail(handle, f"peer {peer:016x} is lost: {reason}")
        self._events.append(PeerLost(peer, reason))

    def events(self) -> list[Event]:
        events, self._events = self._events, []
        return events


class Endpoint(ABC):
    """The part of a transport that needs no network: subclasses move the bytes."""

    guards = True

    def __init__(self, identity: Identity, *, clock: Clock | None = None) -> None:
        self._identity = identity
        self._clock = clock or RealClock()
        self._underway = Underway(self._clock)
        self._regions: dict[int, Region] = {}
        self._sizes: dict[int, int] = {}
        self._tickets: set[int] = set()
        self._is_closed = False

    @property
    def epoch(self) -> int:
        return self._identity.epoch

    def register(self, regions: Sequence[Region]) -> None:
        for region in regions:
            if region.number in self._regions:
                raise BadInput(f"region {region.number} is registered already")
            self._regions[region.number] = region
            self._sizes[region.number] = region.memory.size

    def allow(self, ticket: int) -> None:
        self._tickets.add(ticket)

    def forbid(self, ticket: int) -> None:
        self._tickets.discard(ticket)

    def is_landing(self, ticket: int) -> bool:
        return False

    def post(self, transfer: Transfer) -> int:
        self._check_open()
        _check(transfer)
        fault = fault_of(transfer.local, self._sizes)
        if fault is not None:
            raise BadInput(f"this transfer cannot begin: {fault}")
        local, remote = merged(transfer.local, transfer.remote)
        handle = self._underway.begin(transfer)
        self._start(handle, transfer, local, remote)
        return handle

    @abstractmethod
    def _start(self, handle: int, transfer: Transfer, local: Runs, remote: Runs) -> None:
        """Begins to move bytes; `local` and `remote` are checked and merged."""

    def _fault(self, runs: Runs, ticket: int) -> str | None:
        """Why a peer's transfer may not touch these runs of our memory; None if it may."""
        is_message = ticket == 0 and not len(runs)
        if not is_message and ticket not in self._tickets:
            return f"ticket {ticket} is not allowed here"
        return fault_of(runs, self._sizes)

    def _check_open(self) -> None:
        if self._is_closed:
            raise BadState("the transport is closed")


def _check(transfer: Transfer) -> None:
    local, remote = transfer.local, transfer.remote
    if local.shape != remote.shape or not np.array_equal(local[:, 2], remote[:, 2]):
        raise BadInput(
            f"local runs {local.shape} and remote runs {remote.shape} are not of the same sizes"
        )
    if len(local) > RUNS_MAX:
        raise BadInput(f"a transfer of {len(local)} runs, at most {RUNS_MAX}")
    if len(transfer.notification) > FRAME_BYTES_MAX:
        raise BadInput(f"a notification of {len(transfer.notification)} bytes")
    if not 0 < transfer.within_s < float("inf"):
        raise BadInput(f"within_s is {transfer.within_s}: every transfer has a deadline")
