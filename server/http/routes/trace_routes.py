"""/trace/start and /trace/stop: all stages, fetches and steps in between, as a file for Perfetto.

The answer of stop is a trace-event document: ui.perfetto.dev and chrome://tracing open it.
"""

from __future__ import annotations

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

import ess
from ess.engine.process.messages import Traced
from ess.overlap import trace_events
from ess.server.http.openapi.door import Door
from ess.server.http.responses import answer
from ess.server.process.service import Service


async def start(request: Request) -> Response:
    service: Service = request.app.state.service
    await service.link.start_trace()
    return answer({"tracing": True})


async def stop(request: Request) -> Response:
    service: Service = request.app.state.service
    traced = await service.link.stop_trace()
    named = {"content-disposition": 'attachment; filename="ess-trace.json"'}
    return answer(trace_document(traced, title=f"ess {service.name}"), headers=named)


def trace_document(traced: Traced, *, title: str) -> dict[str, Any]:
    """One thread per lane, in order of each lane's first span."""
    lanes = {lane: at for at, lane in enumerate(dict.fromkeys(span.lane for span in traced.spans))}
    events = [trace_events.named("process_name", title, process=0, thread=0)]
    for lane, at in lanes.items():
        events.append(trace_events.named("thread_name", lane, process=0, thread=at))
    events += [
        trace_events.span(
            span.name,
            process=0,
            thread=lanes[span.lane],
            start_us=span.start_us,
            took_us=span.took_us,
        )
        for span in traced.spans
    ]
    about = {"version": ess.__version__, "left_out": traced.left_out}
    return {"traceEvents": events, "otherData": about}


DOORS: Final = (
    Door("POST", ("/trace/start", "/start_profile"), start, "Keep what every step does."),
    Door("POST", ("/trace/stop", "/stop_profile"), stop, "What was kept, as a trace for Perfetto."),
)
