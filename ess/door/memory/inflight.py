"""Copies under way and what becomes true when each has landed.

One lane, first in first out. Every submission carries its commit: the change of state that may be
published once the copy's event has passed. Commits run in submission order, in the owner's thread,
and only at named moments (`settle`, `settle_until`, `drain`), never behind its back. So "after the
last copy that touches this page" needs no bookkeeping per page: it is `after(...)`, a commit
without a copy, which runs when everything submitted before it has landed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ess.kernels.streams import Event, Lane, RowCopy

Commit = Callable[[], None]


class Landing(Protocol):
    """When it is done, something has landed."""

    def done(self) -> bool: ...

    def wait(self, timeout_s: float | None = None) -> None: ...


class Marks(Protocol):
    def mark(self) -> Landing:
        """Done when everything that is queued now is."""


class Waiting(NamedTuple):
    event: Landing
    commit: Commit


class Pending:
    """What waits for copies that another owner has queued, in the order of their lane."""

    def __init__(self, lane: Marks) -> None:
        self._lane = lane
        self._pending: deque[Waiting] = deque()

    @property
    def pending_count(self) -> int:
        return len(self._pending)

    def track(self, event: Landing, commit: Commit) -> None:
        """`commit` once this has landed, and all that was under way before it."""
        self._pending.append(Waiting(event, commit))

    def after(self, commit: Commit) -> None:
        """`commit` once all that is under way now has landed; at once when nothing is."""
        if self._pending:
            self._pending.append(Waiting(self._lane.mark(), commit))
        else:
            commit()

    def settle(self) -> None:
        """Commit what has landed; wait for nothing."""
        while self._pending and self._pending[0].event.done():
            self._pending.popleft().commit()

    def settle_until(self, event: Landing) -> None:
        """Wait for `event` and commit everything submitted up to it."""
        event.wait()
        assert event.done(), "a wait ended before its copy had landed"
        if all(each is not event for each, _ in self._pending):
            return
        landed: Landing | None = None
        while landed is not event:
            landed, commit = self._pending.popleft()
            assert landed.done(), "a lane must finish in the order of submission"
            commit()

    def check(self) -> None:
        """The lane is first in, first out: nothing is done behind a copy that is not."""
        done = [event.done() for event, _ in reversed(self._pending)]
        assert sorted(done) == done, "a later copy is done before an earlier one"

    def drain(self) -> None:
        """Waits for all. A wait that is broken off, as by Ctrl-C, loses no commit."""
        while self._pending:
            self.settle_until(self._pending[0].event)


class InFlight(Pending):
    """Copies that this process submits to a lane, and their commits."""

    def __init__(self, lane: Lane) -> None:
        super().__init__(lane)
        self._copies = lane

    def submit(self, copies: Sequence[RowCopy], commit: Commit) -> Event:
        event = self._copies.submit(copies)
        self.track(event, commit)
        return event
