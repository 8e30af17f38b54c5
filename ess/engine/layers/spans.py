"""A trace while it is wanted: every stage of every layer, every fetch, every step.

Costs nothing while off. At `SPANS_MAX` spans it keeps no more, so a trace that is never stopped
takes a bounded amount of memory; `left_out` says how many spans came after.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ess.clock import Clock
from ess.engine.plan import StepResult
from ess.engine.process.driven import Driven
from ess.engine.process.messages import HandoffLine, Traced, TraceSpan

SPANS_MAX: Final = 200_000
STEPS: Final = "steps"
STAGES: Final = "stages"
FETCHES: Final = "fetches"


class Recorder:
    def __init__(self, clock: Clock) -> None:
        self.is_on = False
        self._clock = clock
        self._spans: list[TraceSpan] = []
        self._left_out = 0
        self._began_ns = 0

    def start(self) -> None:
        self.is_on, self._spans, self._left_out = True, [], 0
        self._began_ns = self._clock.now_ns()

    def stop(self, handoffs: Sequence[HandoffLine] = ()) -> Traced:
        """Ends the trace and returns it. Handoffs that began since its start have a lane each."""
        self.is_on = False
        for line in handoffs[::-1]:
            if line.began_s * 1e9 >= self._began_ns:
                self._handoff(line)
        assert not self._left_out or len(self._spans) == SPANS_MAX, "a span was left out early"
        spans, self._spans = self._spans, []
        return Traced(tuple(spans), self._left_out)

    def before(self, engine: Driven) -> None:
        """Called before each step: the step keeps its spans if a trace is on; earlier spans are
        dropped."""
        for owner in (engine.tuning.timeline, engine.offload.timings):
            owner.keeps_spans = self.is_on
            owner.spans.clear()

    def after(self, engine: Driven, result: StepResult, began_s: float) -> None:
        if not self.is_on:
            return
        self._keep(
            STEPS, _name(engine.step_count, result), round(began_s * 1e9), self._clock.now_ns()
        )
        for span in engine.tuning.timeline.spans:
            self._keep(STAGES, f"{span.stage} L{span.layer}", span.started_ns, span.finished_ns)
        for layer, started_ns, finished_ns in engine.offload.timings.spans:
            self._keep(FETCHES, f"fetch L{layer}", started_ns, finished_ns)

    def _handoff(self, line: HandoffLine) -> None:
        """Adds spans of a handoff: one up to each moment, named by that moment."""
        lane = f"handoff {line.uid} {line.kind}: {line.outcome}"
        since_ns = round(line.began_s * 1e9)
        for name, at_s in sorted(line.marks, key=lambda mark: mark[1]):
            until_ns = max(since_ns, round((line.began_s + at_s) * 1e9))
            if until_ns > since_ns:
                self._keep(lane, name, since_ns, until_ns)
            since_ns = until_ns

    def _keep(self, lane: str, name: str, started_ns: int, finished_ns: int) -> None:
        assert started_ns <= finished_ns, f"{name} ends before it starts"
        if len(self._spans) == SPANS_MAX:
            self._left_out += 1
            return
        start_us = (started_ns - self._began_ns) / 1e3
        self._spans.append(TraceSpan(lane, name, start_us, (finished_ns - started_ns) / 1e3))


def _name(number: int, result: StepResult) -> str:
    parts = [f"step {number}", f"{result.turn_count} requests"]
    if result.chunks:
        tokens = sum(chunk.count for chunk in result.chunks)
        parts.append(f"{tokens} prompt tokens of {len(result.chunks)} requests")
    return ", ".join(parts)
