"""Between workers in one process: a copy, under the rules of every other transport."""

from __future__ import annotations

import threading
from collections import deque

from ess.clock import Clock
from ess.transfer.endpoint import Endpoint, Identity
from ess.transfer.runs import Runs, views
from ess.transfer.transport import Event, Transfer


class Exchange:
    """Where the transports of one process find one another: by name instead of by address."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.endpoints: dict[bytes, InProcessTransport] = {}


class InProcessTransport(Endpoint):
    """The sender's `poll` copies; the exchange's lock keeps it off memory that is being closed."""

    def __init__(
        self,
        identity: Identity,
        *,
        exchange: Exchange,
        name: str,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(identity, clock=clock)
        self._exchange = exchange
        self._name = name.encode()
        self._looked_s = self._clock.now_s()
        self._names: dict[int, bytes] = {}
        self._fenced: set[int] = set()
        self._queue: deque[tuple[int, Transfer, Runs, Runs]] = deque()
        self._inbox: deque[tuple[int, bytes]] = deque()
        with exchange.lock:
            exchange.endpoints[self._name] = self

    def metadata(self) -> bytes:
        return self._identity.hello(address=self._name)

    def connect(self, metadata: bytes) -> int:
        self._check_open()
        envelope, hello = self._identity.greeted(metadata)
        self._names[envelope.sender] = hello.address
        with self._exchange.lock:
            self._fenced.discard(envelope.sender)
        return envelope.sender

    def allow(self, ticket: int) -> None:
        with self._exchange.lock:
            super().allow(ticket)

    def forbid(self, ticket: int) -> None:
        with self._exchange.lock:
            super().forbid(ticket)

    def is_landing(self, ticket: int) -> bool:
        return bool(self._inbox)

    def poll(self) -> list[Event]:
        self._check_open()
        self._watch()
        for handle, transfer in self._underway.late():
            self._underway.fail(handle, f"not done within {transfer.within_s} s")
        while self._queue:
            self._move(*self._queue.popleft())
        while self._inbox:
            self._underway.notified(*self._inbox.popleft())
        return self._underway.events()

    def disconnect(self, peer: int) -> None:
        for handle in self._underway.of_peer(peer):
            self._underway.fail(handle, f"we disconnected from {peer:016x}")
        self._names.pop(peer, None)
        with self._exchange.lock:
            self._fenced.add(peer)

    def close(self) -> None:
        with self._exchange.lock:
            if self._exchange.endpoints.get(self._name) is self:
                del self._exchange.endpoints[self._name]
        self._is_closed = True

    def _start(self, handle: int, transfer: Transfer, local: Runs, remote: Runs) -> None:
        if transfer.peer in self._names:
            self._queue.append((handle, transfer, local, remote))
        else:
            self._underway.fail(handle, f"peer {transfer.peer:016x} is not connected")

    def _move(self, handle: int, transfer: Transfer, local: Runs, remote: Runs) -> None:
        if self._underway.find(handle) is None:
            return
        with self._exchange.lock:
            peer = self._exchange.endpoints.get(self._names[transfer.peer])
            if peer is None or peer.epoch != transfer.peer:
                fault: str | None = "it has just gone"
            else:
                fault = peer._accept(self.epoch, transfer, views(local, self._regions), remote)
        if fault is None:
            self._underway.complete(handle)
        else:
            self._underway.fail(handle, f"refused: {fault}")

    def _accept(
        self, sender: int, transfer: Transfer, theirs: list[memoryview], remote: Runs
    ) -> str | None:
        """The owner's part of a transfer, under the lock: why it is refused, or None."""
        if sender in self._fenced:
            return "it disconnected from us"
        fault = self._fault(remote, transfer.ticket)
        if fault is None:
            for source, target in zip(theirs, views(remote, self._regions), strict=True):
                target[:] = source
            if transfer.notification:
                self._inbox.append((sender, transfer.notification))
        return fault

    def _watch(self) -> None:
        self._looked_s = now_s = self._clock.now_s()
        for epoch, name in list(self._names.items()):
            peer = self._exchange.endpoints.get(name)
            if peer is None or peer.epoch != epoch:
                reason = "it is gone" if peer is None else f"{peer.epoch:016x} answers in its place"
            elif now_s - peer._looked_s > self._identity.silent_s:
                reason = f"silent for {now_s - peer._looked_s:.1f} s"
            else:
                continue
            del self._names[epoch]
            self._underway.lost(epoch, reason)
