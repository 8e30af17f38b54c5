"""A lane whose events are done as soon as they are asked: the question waits for the copy.

So the pools' decisions follow from the calls alone, and not from the speed of a copy: several
processes that make the same calls have the same free pages at every moment. Copies still run beside
compute until a caller asks.
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
