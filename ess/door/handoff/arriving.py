"""One handoff that arrives: its room, what has come of it, when to speak of it again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ess.door.handoff.endings import Timeline
from ess.door.sequences.sequence import Sequence
from ess.pool.pages import PageIds
from ess.transfer.arrivals import Arrival
from ess.transfer.messages import Reason, Reserved

NAG_S: Final = 1.0
NAG_S_MAX: Final = 8.0


@dataclass(slots=True, eq=False)
class Arriving:
    """A handoff under way. `ending` is why it ends, while the peer has yet to answer that."""

    peer: int
    sequence: Sequence
    room: Reserved
    pages: PageIds
    arrival: Arrival
    began_s: float
    nag_s: float
    nag_gap_s: float = NAG_S
    posted_count: int = 0
    is_answered: bool = False
    is_to_repeat: bool = False
    ending: Reason | None = None
    sentence: str = ""
    marks: dict[str, float] = field(default_factory=dict)

    @property
    def uid(self) -> int:
        return self.room.uid

    @property
    def timeline(self) -> Timeline:
        """Since the room was reserved."""
        return Timeline(self.began_s, tuple(self.marks.items()))

    def mark(self, name: str, now_s: float) -> None:
        self.marks.setdefault(name, now_s - self.began_s)

    def moved(self, now_s: float) -> None:
        """Something has come of it: there is no reason to ask for a while."""
        self.nag_gap_s = NAG_S
        self.nag_s = now_s + NAG_S

    def nagged(self, now_s: float) -> bool:
        """It is spoken of now, and next after twice the pause; whether that can still grow."""
        can_grow = self.nag_gap_s < NAG_S_MAX
        self.nag_gap_s = min(2 * self.nag_gap_s, NAG_S_MAX)
        self.nag_s = now_s + self.nag_gap_s
        return can_grow
