"""A handoff that arrives: its sequence and pages, and a leg from each worker that brings some."""

from __future__ import annotations

from dataclasses import dataclass

from ess.array_types import PageIds
from ess.door.handoff.endings import Timeline
from ess.door.handoff.incoming.leg import Leg
from ess.door.sequences.sequence import Sequence
from ess.pool.warmup import WindowSet


@dataclass(slots=True, eq=False)
class Arriving:
    """`slot` is where the room for its windows begins. It `is_given_up` when its owner wants no
    outcome any more."""

    uid: int
    sequence: Sequence
    pages: PageIds
    slot: int
    row_count: int
    began_s: float
    legs: tuple[Leg, ...] = ()
    is_given_up: bool = False
    missed: Leg | None = None

    @property
    def is_over(self) -> bool:
        return all(leg.is_over for leg in self.legs)

    def windows(self) -> tuple[list[WindowSet], int]:
        """The windows of all layer groups. A worker may have fewer windows than the others: the
        latest of them."""
        known = [leg.windows for leg in sorted(self.legs, key=lambda leg: leg.origin.groups.start)]
        parts = [windows for windows in known if windows is not None]
        assert len(parts) == len(known), f"handoff {self.uid}: windows of {len(parts)} legs"
        most = max(count for _, count in parts)
        sets = [(each, last + (most - count)) for of, count in parts for each, last in of]
        return sets, most

    def timeline(self, landed_s: float | None = None) -> Timeline:
        """The moments since the room was reserved: what any leg did first, and when the last leg
        was complete."""
        times = {
            name: [leg.moments[name] for leg in self.legs if name in leg.moments]
            for name in ("answered", "first piece", "complete")
        }
        at_s = {name: min(moments) for name, moments in times.items() if moments}
        if len(times["complete"]) == len(self.legs):
            at_s["complete"] = max(times["complete"])
        else:
            at_s.pop("complete", None)
        if landed_s is not None:
            at_s["landed"] = landed_s
        marks = sorted(at_s.items(), key=lambda mark: mark[1])
        return Timeline(self.began_s, tuple((name, t - self.began_s) for name, t in marks))
