"""A lane whose jobs are done whenever somebody asks whether they are: the question waits.

What an owner of pools does then follows from the calls alone, and not from how fast a copy was. So
several processes that make the same calls have the same free pages at every moment. Copies still
run beside compute, as long as nobody asks.
"""

from __future__ import annotations

from collections.abc import Sequence

from ess.kernels.streams import Event, Lane, RowCopy


class PatientEvent:
    def __init__(self, event: Event) -> None:
        self._event = event

    def done(self) -> bool:
        self._event.wait()
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        self._event.wait(timeout_s)

    @property
    def started_ns(self) -> int:
        return self._event.started_ns

    @property
    def finished_ns(self) -> int:
        return self._event.finished_ns


class PatientLane:
    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self.at_once_bytes: int = getattr(lane, "at_once_bytes", 0)

    def submit(self, copies: Sequence[RowCopy]) -> Event:
        return PatientEvent(self._lane.submit(copies))

    def mark(self) -> Event:
        return PatientEvent(self._lane.mark())

    def close(self) -> None:
        self._lane.close()
