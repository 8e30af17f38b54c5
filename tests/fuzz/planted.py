"""Faults to be found: an application around ours that breaks at one nested value, or keeps things.

Nothing generates `{"sampling_params": {"stop": [[""]]}}` at once. It is reached by steps, each of
which reaches a line here.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Planted(Exception):
    """Only the raising one raises it."""


class Raising:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def read() -> Any:
            message = await receive()
            check(message.get("body", b""))
            return message

        await self._app(scope, read, send)


def check(raw: bytes) -> None:
    try:
        tree = json.loads(raw)
    except (ValueError, RecursionError):
        return
    asked = tree.get("sampling_params") if isinstance(tree, dict) else None
    stop = asked.get("stop") if isinstance(asked, dict) else None
    if isinstance(stop, list):
        first = stop[0] if stop else None
        if isinstance(first, list):
            first = first[0] if first else None
            if isinstance(first, str):
                raise Planted("a stop in a list in a list")


class Cutting:
    """Closes the connection in the middle of every stream."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle: Any = getattr(send, "__self__", None)

        async def cut(message: Message) -> None:
            await send(message)
            if message.get("more_body"):
                cycle.transport.close()

        await self._app(scope, receive, cut)


class Keeping:
    """Forgets nothing that was sent to one path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._kept: list[Send] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("path") == "/detokenize":
            self._kept.append(send)
        await self._app(scope, receive, send)
