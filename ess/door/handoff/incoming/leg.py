"""The part of an arriving handoff that one worker brings, and when to send its next message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ess.door.handoff.incoming.origins import Origin
from ess.pool.warmup import WindowSet
from ess.transfer.arrivals import Arrival
from ess.transfer.messages import Reason, Reserved

NAG_S: Final = 1.0
NAG_S_MAX: Final = 8.0


@dataclass(slots=True, eq=False)
class Leg:
    """`ending` is why it ends, as long as the peer has not answered that. When it `is_over`,
    nothing lands under its ticket any more; it `is_whole` if everything had arrived by then, else
    `sentence` says why not. `moments` are seconds of the clock."""

    origin: Origin
    room: Reserved
    arrival: Arrival
    nag_s: float
    nag_gap_s: float = NAG_S
    posted_count: int = 0
    is_answered: bool = False
    is_to_repeat: bool = False
    ending: Reason | None = None
    is_over: bool = False
    is_whole: bool = False
    sentence: str = ""
    windows: tuple[list[WindowSet], int] | None = None
    moments: dict[str, float] = field(default_factory=dict)

    @property
    def uid(self) -> int:
        return self.room.uid

    @property
    def peer(self) -> int:
        return self.origin.peer

    @property
    def is_going_on(self) -> bool:
        return self.ending is None and not self.is_over

    @property
    def is_counted(self) -> bool:
        """Pieces of it are taken: a late copy may yet spoil what has come."""
        return self.ending in (None, Reason.DONE) and not self.is_over

    def mark(self, name: str, now_s: float) -> None:
        self.moments.setdefault(name, now_s)

    def moved(self, now_s: float) -> None:
        """A part has come: there is no reason to ask again for a while."""
        self.nag_gap_s = NAG_S
        self.nag_s = now_s + NAG_S

    def nagged(self, now_s: float) -> bool:
        """A message about it leaves now, and the next one after twice the pause. Returns whether
        the pause can still grow."""
        can_grow = self.nag_gap_s < NAG_S_MAX
        self.nag_gap_s = min(2 * self.nag_gap_s, NAG_S_MAX)
        self.nag_s = now_s + self.nag_gap_s
        return can_grow
