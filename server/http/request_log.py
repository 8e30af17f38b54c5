"""`--request-log`: a line per request, when its answer has been sent; nothing of its content. With
`--log-format json` the line is a record whose fields are the parts of the line.

Plain ASGI around the whole app, so that refusals have their line too. It reads what the layers
below have left in the request's state: wrapping `send` would keep events from the short way to the
socket. Tokens and times are those of the engine's requests, if there are any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from ess import console
from ess.clock import Clock
from ess.server.process.logs.log_records import record
from ess.server.process.requests.call import Call


class RequestLog:
    def __init__(self, app: ASGIApp, *, clock: Clock, is_json: bool = False) -> None:
        self._app = app
        self._write = written if is_json else line
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state, began_s = scope.setdefault("state", {}), self._clock.now_s()
        try:
            await self._app(scope, receive, send)
        finally:
            took_s = self._clock.now_s() - began_s
            console.note(self._write(state, scope["method"], began_s=began_s, took_s=took_s))


def line(state: Mapping[str, Any], method: str, *, began_s: float, took_s: float) -> str:
    """The line, with the route's path, not the client's; an id is visible ASCII, so one line."""
    route, status = state.get("answered", ("other", "unanswered"))
    shown = f"ess: request {state.get('request_id', '-')} {method} {route}"
    why = f" ({state['reason']})" if state.get("reason") else ""
    shown += f" {status}{why} after {took_s:.3f} s"
    call: Call | None = state.get("call")
    if call is None:
        return shown
    first = f", the first after {call.first_at_s - began_s:.3f} s" if call.first_at_s else ""
    return f"{shown}: {call.prompt_count} prompt tokens, {call.made_count} made{first}"


def written(state: Mapping[str, Any], method: str, *, began_s: float, took_s: float) -> str:
    """The line as a record; `trace_id` is there if the request came with a trace."""
    route, status = state.get("answered", ("other", None))
    parts: dict[str, Any] = {"request_id": state.get("request_id"), "method": method}
    parts |= {"route": route, "status": status, "took_s": round(took_s, 6)}
    if reason := state.get("reason"):
        parts["reason"] = reason
    if trace := state.get("trace"):
        parts["trace_id"] = trace.split("-")[1]
    if session := state.get("session_id"):
        parts["session_id"] = session
    call: Call | None = state.get("call")
    if call is not None:
        parts |= {"prompt_tokens": call.prompt_count, "made_tokens": call.made_count}
        parts["first_s"] = round(call.first_at_s - began_s, 6) if call.first_at_s else None
    return record("info", "request", **parts).decode()
