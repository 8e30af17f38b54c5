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


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderStats:
    """Counts since the beginning: handoffs, messages refused, units asked for again, transfers that
    failed, and bytes."""

    sent: int
    lapsed: int
    refused: int
    again_count: int
    failed_count: int
    sent_bytes: int
