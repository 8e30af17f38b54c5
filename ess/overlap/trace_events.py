"""The trace-event form of chrome://tracing and ui.perfetto.dev: entries of `traceEvents`."""

from __future__ import annotations

from typing import Any


def named(what: str, name: str, *, process: int, thread: int) -> dict[str, Any]:
    """A name for a process ("process_name") or a thread ("thread_name")."""
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def span(
    name: str, *, process: int, thread: int, start_us: float, took_us: float
) -> dict[str, Any]:
    times = {"ts": start_us, "dur": took_us}
    return {"name": name, "ph": "X", "pid": process, "tid": thread} | times
