"""How long each stage of a step took, and on request when every run of a stage began and ended.

On a device the host sees only the queueing of stages. There a stopwatch records moments on the
device's own clock, for some steps only, and reports them when the steps are over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

from ess.clock import Clock

A = ParamSpec("A")
T = TypeVar("T")
At: TypeAlias = Callable[[Any], int]
"""The time of a moment in nanoseconds."""
Note: TypeAlias = Callable[[At], None]


class Stopwatch(Protocol):
    """Times the steps of a device. While it `rests` it picks no step to be timed, and does not
    report a step that is timed all the same."""

    rests: bool

    @property
    def is_on(self) -> bool:
        """Whether the step that is being queued is timed."""

    def start(self) -> bool:
        """Begins a step; returns whether it is timed (out of turn too, where that is possible)."""

    def skip(self) -> None:
        """Gives up timing the step that has begun: nothing of it is queued."""

    def mark(self) -> Any:
        """Queues a moment: the time when the device has done all that was queued before."""

    def note(self, note: Note) -> None:
        """`note` is called when all moments of the step have passed."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of a stage in a layer, for the queries from `first_query` on."""

    layer: int
    first_query: int
    stage: str
    started_ns: int
    finished_ns: int


class Ranges(Protocol):
    """NVTX ranges: the range pushed last is popped first."""

    def range_push(self, msg: str, /) -> object: ...
    def range_pop(self) -> object: ...


@dataclass(slots=True, kw_only=True)
class Timeline:
    """`total_ns` and `run_count` per stage until `restart`; spans of a step if `keeps_spans`. With
    a `stopwatch` they cover only the steps that it has reported. A profiler's `ranges` are pushed
    and popped around every stage."""

    clock: Clock
    stopwatch: Stopwatch | None = None
    keeps_spans: bool = False
    ranges: Ranges | None = None
    total_ns: Counter[str] = field(default_factory=Counter)
    run_count: Counter[str] = field(default_factory=Counter)
    spans: list[Span] = field(default_factory=list)

    def start(self) -> Any:
        """Marks the start of a stage, for `note`."""
        if self.stopwatch is None:
            return self.clock.now_ns()
        return self.stopwatch.mark() if self.stopwatch.is_on else None

    def note(self, of: WatchedStages, stage: str, started: Any) -> None:
        """A stage that started at `started` ends now."""
        layer, first_query = of.number, of.first_query
        if self.stopwatch is None:
            self._took(Span(layer, first_query, stage, started, self.clock.now_ns()))
        elif started is not None:
            ended = self.stopwatch.mark()
            self.stopwatch.note(
                lambda at: self._took(Span(layer, first_query, stage, at(started), at(ended)))
            )

    def took(self, stage: str, run_count: int, taken_ns: int) -> None:
        """Adds runs of the stage in `run_count` layers, over all queries, without their spans."""
        assert taken_ns >= 0, f"{stage} ends before it starts"
        assert not self.keeps_spans, f"{stage} in {run_count} layers, without their spans"
        self.total_ns[stage] = self.total_ns.get(stage, 0) + taken_ns
        self.run_count[stage] = self.run_count.get(stage, 0) + run_count

    def _took(self, span: Span) -> None:
        taken_ns = span.finished_ns - span.started_ns
        assert taken_ns >= 0, f"{span.stage} of layer {span.layer} ends before it starts"
        self.total_ns[span.stage] += taken_ns
        self.run_count[span.stage] += 1
        if self.keeps_spans:
            self.spans.append(span)

    def total_us(self, *stages: str) -> float:
        assert len(set(stages)) == len(stages), f"a stage is counted twice: {stages}"
        return sum(self.total_ns[stage] for stage in stages) / 1e3

    def restart(self) -> None:
        if not self.run_count and not self.spans:
            return
        assert self.total_ns.keys() == self.run_count.keys(), "a stage has a time, but never ran"
        self.total_ns.clear()
        self.run_count.clear()

    def check(self) -> None:
        assert self.total_ns.keys() == self.run_count.keys(), "a stage has a time, but never ran"
        assert all(ns >= 0 for ns in self.total_ns.values()), f"times below zero: {self.total_ns}"
        assert all(count > 0 for count in self.run_count.values()), "a stage ran less than once"
        assert all(span.started_ns <= span.finished_ns for span in self.spans), "a span ends early"


class WatchedStages(Protocol):
    """Stages of one layer for the queries from `first_query` on."""

    @property
    def timeline(self) -> Timeline: ...
    @property
    def number(self) -> int: ...
    @property
    def first_query(self) -> int: ...


@contextmanager
def within(ranges: Ranges, name: str) -> Iterator[None]:
    ranges.range_push(name)
    try:
        yield
    finally:
        ranges.range_pop()


W = TypeVar("W", bound=WatchedStages)


def timed(stage: Callable[Concatenate[W, A], T]) -> Callable[Concatenate[W, A], T]:
    """Adds the method's time to the timeline, under the method's name."""
    name = stage.__name__

    def noted(self: W, /, *args: A.args, **kwargs: A.kwargs) -> T:
        timeline = self.timeline
        started = timeline.start()
        ranges = timeline.ranges
        if ranges is None:
            result = stage(self, *args, **kwargs)
        else:
            with within(ranges, f"{name} L{self.number}"):
                result = stage(self, *args, **kwargs)
        timeline.note(self, name, started)
        return result

    return noted
