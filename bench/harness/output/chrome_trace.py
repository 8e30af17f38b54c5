"""Timelines in the form that chrome://tracing and ui.perfetto.dev read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ess.overlap import trace_events
from ess.sim.timeline import Span


def chrome_events(parts: Sequence[tuple[str, Sequence[Span]]]) -> list[dict[str, Any]]:
    """One process per part, one thread per lane, in the trace-event form."""
    events: list[dict[str, Any]] = []
    for process, (title, spans) in enumerate(parts):
        lanes = list(dict.fromkeys(span.lane for span in spans))
        events.append(trace_events.named("process_name", title, process=process, thread=0))
        for at, lane in enumerate(lanes):
            events.append(trace_events.named("thread_name", lane, process=process, thread=at))
        events += [
            trace_events.span(
                span.name,
                process=process,
                thread=lanes.index(span.lane),
                start_us=span.start_us,
                took_us=span.end_us - span.start_us,
            )
            for span in spans
        ]
    return events


def write_chrome(path: Path, parts: Sequence[tuple[str, Sequence[Span]]]) -> None:
    """Writes a file for chrome://tracing and ui.perfetto.dev."""
    path.write_bytes(msgspec.json.encode({"traceEvents": chrome_events(parts)}))
