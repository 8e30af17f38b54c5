"""Lanes and an event queue: when each stage of a step runs, and on which lane.

A lane is a resource that does one thing at a time, in the order in which things were added: a
stream. A task starts when its lane is free and all tasks it waits for have ended. As tasks of a
lane keep their order and may only wait for tasks that were added before, one pass in order of
addition gives the same result as an event queue.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ess.errors import BadInput

COMPUTE = "compute"
EXCHANGE = "exchange"
FETCH = "fetch"
STORE = "store"


class Span(NamedTuple):
    """A busy interval of a lane, in microseconds from the start of the step."""

    lane: str
    name: str
    start_us: float
    end_us: float


@dataclass(slots=True)
class Timeline:
    """Spans in order of addition; a task is its index among them."""

    added: list[tuple[str, str, float, float]] = field(default_factory=list)
    free_us: dict[str, float] = field(default_factory=dict)

    def add(self, lane: str, name: str, duration_us: float, after: Iterable[int] = ()) -> int:
        if not duration_us >= 0:
            raise BadInput(f"{name} on {lane} would take {duration_us} us")
        added = self.added
        start_us = self.free_us.get(lane, 0.0)
        for task in after:
            ended_us = added[task][3]
            if ended_us > start_us:
                start_us = ended_us
        self.free_us[lane] = end_us = start_us + duration_us
        added.append((lane, name, start_us, end_us))
        return len(added) - 1

    @property
    def spans(self) -> list[Span]:
        return [Span(*each) for each in self.added]

    @property
    def end_us(self) -> float:
        return max(self.free_us.values(), default=0.0)

    def busy_us(self, lane: str) -> float:
        return sum(span.end_us - span.start_us for span in self.spans if span.lane == lane)
