"""The group as one rank sees it. World rank = stage * team size + member."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ess.comm.link import Link
from ess.comm.team import Team


@dataclass(frozen=True, slots=True)
class Beat:
    """A peer's counter, how long the peer was silent, and how long its counter has not moved."""

    progress: int
    silent_s: float
    still_s: float


class Group(Protocol):
    """`next` and `previous` lead to the same member of the neighbouring stages.

    `reports` are links by rank: rank 0 has one to every other rank, the others one to rank 0. They
    carry no tensors.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def next(self) -> Link | None: ...

    @property
    def previous(self) -> Link | None: ...

    @property
    def reports(self) -> Mapping[int, Link]: ...

    @property
    def team(self) -> Team: ...

    def advance(self) -> None:
        """Says that this rank's main loop is running: heartbeats carry the count of these calls."""

    def beats(self) -> Mapping[int, Beat]:
        """The beats of all other ranks on rank 0, elsewhere of rank 0. They come twice a second."""

    def fail(self, sentence: str) -> None:
        """Ends the group: every link of every rank raises LinkLost with this sentence."""

    def close(self) -> None:
        """Leaves in order. A group of another generation may be joined afterwards."""


class WrappedGroup:
    """A group that passes calls on to another; subclasses replace links or the team."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size
        self.next, self.previous = group.next, group.previous
        self.reports, self.team = group.reports, group.team

    def advance(self) -> None:
        self._group.advance()

    def beats(self) -> Mapping[int, Beat]:
        return self._group.beats()

    def fail(self, sentence: str) -> None:
        self._group.fail(sentence)

    def close(self) -> None:
        self._group.close()
