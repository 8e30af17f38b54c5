"""`--request-log`: a line per request, when its answer has left; nothing of what was said in it.

Plain ASGI around the whole app, so that refusals have their line too. Tokens and times are those of
the engine's requests, where there are any.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ess import console
from ess.clock import Clock
from ess.server.process.link import Call


class RequestLog:
    def __init__(self, app: ASGIApp, *, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, status = self._clock.now_s(), 0

        async def seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, seen)
        finally:
            took_s = self._clock.now_s() - began_s
            console.note(line(scope, status, began_s=began_s, took_s=took_s))


def line(scope: Scope, status: int, *, began_s: float, took_s: float) -> str:
    """The route's own path, not the client's; an id is visible ASCII, so it is one line."""
    state = scope.get("state", {})
    route = scope.get("route_name", "other")
    shown = f"ess: request {state.get('request_id', '-')} {scope['method']} {route}"
    shown += f" {status or 'unanswered'} after {took_s:.3f} s"
    call: Call | None = state.get("call")
    if call is None:
        return shown
    first = f", the first after {call.first_at_s - began_s:.3f} s" if call.first_at_s else ""
    return f"{shown}: {call.prompt_count} prompt tokens, {call.made_count} made{first}"
