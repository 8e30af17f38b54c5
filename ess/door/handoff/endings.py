"""How handoffs that leave have ended."""

from __future__ import annotations

from dataclasses import dataclass

from ess.transfer.messages import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Seconds of the clock at which it was offered, its target came, its prompt was made, and it
    ended. None for what has not been."""

    offered_s: float
    reserved_s: float | None
    made_s: float | None
    ended_s: float


@dataclass(frozen=True, slots=True)
class Sent:
    """The receiver has said that all had come."""

    uid: int
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Lapsed:
    """It ended without that; `sentence` says why."""

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
