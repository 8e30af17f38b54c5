"""The time of a step: the engine's own stages and its lane's jobs as one timeline.

The engine notes the stages of attention. The time between them is named by its place: `begin`
before the first layer, `experts` between two layers (output projection included), `head` before the
MTP layer (sampling included), `end` after the last.
"""

from __future__ import annotations

from collections.abc import Sequence

from ess.bench.harness.measure.slow_lane import Job
from ess.overlap.timeline import Span as Stage
from ess.sim.timeline import COMPUTE, FETCH, STORE, Span


def step_spans(
    stages: Sequence[Stage], jobs: Sequence[Job], *, layers: int, begin_ns: int, end_ns: int
) -> list[Span]:
    """The lanes of one step of a model of `layers`, without MTP; the compute lane has no gaps."""
    spans: list[Span] = []
    at_ns, before = begin_ns, -1
    for stage in sorted(stages, key=lambda stage_span: stage_span.started_ns):
        if stage.started_ns > at_ns:
            name = _between(before, stage.layer, layers)
            spans.append(_span(COMPUTE, name, at_ns, stage.started_ns, begin_ns))
        start_ns = max(stage.started_ns, at_ns)
        if stage.finished_ns > start_ns:
            spans.append(_span(COMPUTE, stage.stage, start_ns, stage.finished_ns, begin_ns))
        at_ns, before = max(at_ns, stage.finished_ns), stage.layer
    if end_ns > at_ns:
        spans.append(_span(COMPUTE, "end", at_ns, end_ns, begin_ns))
    for job in jobs:
        lane = FETCH if any(start < end_ns for start, _ in job.waits_ns) else STORE
        name = f"{lane} {job.byte_count:,} B"
        spans.append(_span(lane, name, job.started_ns, job.finished_ns, begin_ns))
    return spans


def _between(before: int, after: int, layers: int) -> str:
    if before == after:
        return "attention, between stages"
    if before < 0:
        return "begin"
    return "head" if after == layers else "experts"


def _span(lane: str, name: str, start_ns: int, end_ns: int, begin_ns: int) -> Span:
    return Span(lane, name, (start_ns - begin_ns) / 1e3, (end_ns - begin_ns) / 1e3)
