"""Timelines in the form that chrome://tracing and ui.perfetto.dev read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ess.sim.timeline import Span


def chrome_events(parts: Sequence[tuple[str, Sequence[Span]]]) -> list[dict[str, Any]]:
    """One process per part, one thread per lane, in the trace-event form."""
    events: list[dict[str, Any]] = []
    for process, (title, spans) in enumerate(parts):
        lanes = list(dict.fromkeys(span.lane for span in spans))
        events.append(_named("process_name", process, 0, title))
        events += [_named("thread_name", process, at, lane) for at, lane in enumerate(lanes)]
        events += [
            {
                "name": span.name,
                "ph": "X",
                "pid": process,
                "tid": lanes.index(span.lane),
                "ts": span.start_us,
                "dur": span.end_us - span.start_us,
            }
            for span in spans
        ]
    return events


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def write_chrome(path: Path, parts: Sequence[tuple[str, Sequence[Span]]]) -> None:
    """Writes a file for chrome://tracing and ui.perfetto.dev."""
    path.write_bytes(msgspec.json.encode({"traceEvents": chrome_events(parts)}))
