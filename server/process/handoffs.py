"""Handoff figures from a worker's statuses: how fast rows move, and how long each took.

A status shows the last handoffs that ended; each is counted once, when first seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from ess.engine.process.messages import HandoffLine, HandoffStatus, Status
from ess.server.process.tally import Waits

RATE_S: Final = 5.0
ENDED_WELL: Final = ("landed", "sent")


class Handoffs:
    """Gets every status that is published."""

    def __init__(self) -> None:
        self.latency = Waits()
        self.bootstrap = Waits()
        self.gb_per_s = 0.0
        self._shown: tuple[HandoffLine, ...] = ()

    def take(self, status: HandoffStatus, recent: Iterable[tuple[float, Status]]) -> None:
        known = {(line.uid, line.kind) for line in self._shown}
        self._shown = status.recent
        for line in status.recent:
            if (line.uid, line.kind) not in known:
                self._count(line)
        self.gb_per_s = _gb_per_s(recent)

    def _count(self, line: HandoffLine) -> None:
        """Counts a handoff. A sender's transfer time excludes its wait for the receiver."""
        marks = dict(line.marks)
        if line.outcome in ENDED_WELL and marks:
            end_s = marks.get("landed", max(marks.values()))
            self.latency.add(end_s - marks.get("reserved", 0.0))
        if line.kind == "give" and "reserved" in marks:
            self.bootstrap.add(max(0.0, marks["reserved"]))


def moved_bytes(status: HandoffStatus) -> int:
    return status.received_bytes + status.sent_bytes


def _gb_per_s(recent: Iterable[tuple[float, Status]]) -> float:
    """The rate over the last seconds; a restarted engine begins a new count."""
    moved = [(at_s, moved_bytes(s.handoff)) for at_s, s in recent if s.handoff is not None]
    if not moved:
        return 0.0
    until_s, until = moved[-1]
    since_s, since = next(entry for entry in moved if entry[0] >= until_s - RATE_S)
    return max(0, until - since) / 1e9 / (until_s - since_s) if until_s > since_s else 0.0


def view(status: Status, handoffs: Handoffs) -> dict[str, Any] | None:
    """The figures for dashboards. A uid is text, as JSON numbers have too few digits."""
    said = status.handoff
    if said is None:
        return None
    counts = {
        name.removesuffix("_count"): value
        for name, value in msgspec.structs.asdict(said).items()
        if isinstance(value, int)
    }
    return {
        **counts,
        "gb_per_s": handoffs.gb_per_s,
        "peers": [
            {**msgspec.structs.asdict(peer), "epoch": f"{peer.epoch:016x}"} for peer in said.peers
        ],
        "recent": [{**msgspec.structs.asdict(line), "uid": str(line.uid)} for line in said.recent],
    }
