"""What a rank holds of its group. World rank = stage * team size + member."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ess.comm.link import Link
from ess.comm.team import Team


@dataclass(frozen=True, slots=True)
class Beat:
    """A peer's counter, and for how long the peer was silent and its counter stood still."""

    progress: int
    silent_s: float
    still_s: float


class Group(Protocol):
    """`next` and `previous` lead to the same member of the neighbouring stages.

    `reports` has links by rank: on rank 0 to every other rank, elsewhere to rank 0. They carry no
    tensors.
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
        """Says that the main loop of this rank goes on: a beat carries the count of these calls."""

    def beats(self) -> Mapping[int, Beat]:
        """By rank: on rank 0 of all others, elsewhere of rank 0. Beats come twice a second."""

    def fail(self, sentence: str) -> None:
        """Ends the group: every link of every rank raises LinkLost with this sentence."""

    def close(self) -> None:
        """Leaves in order. The group of another generation may be joined after it."""
