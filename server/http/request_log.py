"""`--request-log`: a line per request, when its answer has been sent; nothing of its content.

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
from ess.server.process.requests.call import Call


class RequestLog:
    def __init__(self, app: ASGIApp, *, clock: Clock) -> None:
        self._app = app
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
            console.note(line(state, scope["method"], began_s=began_s, took_s=took_s))


def line(state: Mapping[str, Any], method: str, *, began_s: float, took_s: float) -> str:
    """The line, with the route's path, not the client's; an id is visible ASCII, so one line."""
    route, status = state.get("answered", ("other", "unanswered"))
    shown = f"ess: request {state.get('request_id', '-')} {method} {route}"
    shown += f" {status} after {took_s:.3f} s"
    call: Call | None = state.get("call")
    if call is None:
        return shown
    first = f", the first after {call.first_at_s - began_s:.3f} s" if call.first_at_s else ""
    return f"{shown}: {call.prompt_count} prompt tokens, {call.made_count} made{first}"
