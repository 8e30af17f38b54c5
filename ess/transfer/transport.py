"""How bytes move between workers: one interface, whose calls never wait.

A transport writes runs of registered memory into that of a peer, one-sided: the peer does nothing
but call its own `poll`. A transfer may carry a notification, which the peer sees after the bytes.

- Every transfer has a deadline and ends in exactly one event: Completed or Failed. Trouble in a
  network or a library is never raised; only arguments that are wrong in themselves are (BadInput).
- A peer is named by its boot epoch. A worker that restarts at the same address is another peer.
- A lost peer is reported once, after its transfers have failed; a later `connect` starts afresh.
- A ticket is the right to touch memory for one handoff. Where `guards` is true the owner's side
  refuses a transfer whose ticket it has not allowed, or no longer allows, before a byte lands, and
  after `disconnect` no byte of that peer lands. Where it is false, as in one-sided hardware, the
  owner keeps the pages of a given-up handoff out of use until the peer has answered or is dead.
  Messages bring no bytes: they have ticket 0, under which nothing lands.
- Both sides `connect`: heartbeats and answers use the connection of their own sender.
- Progress is made inside `poll`, in the thread that calls it. There are no other threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ess.transfer.runs import Region, Runs, no_runs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfer:
    """Bytes from `local` to the peer's `remote`, run by run, then a notification for the peer."""

    peer: int
    local: Runs = field(default_factory=no_runs)
    remote: Runs = field(default_factory=no_runs)
    notification: bytes = b""
    ticket: int = 0
    within_s: float


@dataclass(frozen=True, slots=True)
class Completed:
    handle: int


@dataclass(frozen=True, slots=True)
class Failed:
    handle: int
    reason: str


@dataclass(frozen=True, slots=True)
class Notification:
    peer: int
    content: bytes


@dataclass(frozen=True, slots=True)
class PeerLost:
    peer: int
    reason: str


Event = Completed | Failed | Notification | PeerLost


class Transport(Protocol):
    @property
    def guards(self) -> bool: ...

    @property
    def epoch(self) -> int: ...

    def register(self, regions: Sequence[Region]) -> None:
        """Registers memory for peers; call it before `metadata`, which tells peers of regions."""

    def metadata(self) -> bytes:
        """What a peer needs to `connect`: sealed and small; any channel may carry it."""

    def connect(self, metadata: bytes) -> int:
        """Connects; returns the peer's epoch. BadInput if not sealed, or of another layout."""

    def allow(self, ticket: int) -> None: ...

    def forbid(self, ticket: int) -> None: ...

    def is_landing(self, ticket: int) -> bool:
        """Whether bytes under the ticket may be landing of which no event has told. Where `guards`
        is false this cannot be known, and the answer means nothing."""

    def post(self, transfer: Transfer) -> int:
        """Starts a transfer, whose handle a Completed or Failed repeats. BadInput for bad
        `local`."""

    def poll(self) -> list[Event]: ...

    def disconnect(self, peer: int) -> None: ...

    def close(self) -> None: ...
