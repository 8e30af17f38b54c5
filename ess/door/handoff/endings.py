"""How handoffs have ended: those that arrive have landed or missed, those that leave were sent or
have lapsed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ess.pool.warmup import WindowSet
from ess.transfer.messages import Reason

Marks: TypeAlias = tuple[tuple[str, float], ...]
"""Moments by name, in seconds since a beginning."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """When a handoff began, by the port's clock, and its moments since then, in their order."""

    began_s: float
    marks: Marks

    def marked(self, name: str, now_s: float) -> Timeline:
        return Timeline(self.began_s, (*self.marks, (name, now_s - self.began_s)))


@dataclass(frozen=True, slots=True)
class Landed:
    """The sequence has all rows but its last token's: `resume` it, then `warm_from(*windows)`."""

    uid: int
    windows: tuple[list[WindowSet], int]
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Missed:
    """The rows will not come; the sequence is as `open` made it."""

    uid: int
    sentence: str
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Sent:
    """A departure that ended well: the receiver said that all had come."""

    uid: int
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Lapsed:
    """A departure that failed; `sentence` says why."""

    uid: int
    reason: Reason
    sentence: str
    timeline: Timeline


@dataclass(slots=True, kw_only=True)
class HandoffCounts:
    """What a port has counted since its beginning: handoffs by their end, bytes that came and that
    left, pieces that it asked for again, transfers that failed, pieces and messages that it has
    refused."""

    landed_count: int = 0
    missed_count: int = 0
    sent_count: int = 0
    lapsed_count: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    again_count: int = 0
    failed_count: int = 0
    refused_count: int = 0
