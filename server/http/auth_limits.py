"""ASGI middleware in front of every route: request id, API key, length of the body.

Plain ASGI, because it wraps streams too. When a key is set, every path needs it, also paths that do
not exist. Exempt are those that probes call and the pages: dashboard, /docs, /redoc and what these
load. A browser cannot send a key when it opens an address; a page holds no state of this server,
asks the user for the key and sends it with its own requests.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Sequence
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ess.server.http.openapi import pages
from ess.server.http.request_ids import address, headers_of
from ess.server.http.responses import Denied, TooLarge, error_answer
from ess.server.process.tally import Tally

OPEN_PATHS: Final = frozenset({"/health", "/ready", "/ping", "/dashboard", *pages.PATHS})


class Gate:
    def __init__(self, app: ASGIApp, *, keys: Sequence[str], body_max: int, tally: Tally) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._body_max = body_max
        self._tally = tally

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        state = scope.setdefault("state", {})
        state.update(address(headers))
        path: str = scope["path"]

        def named(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers_of(state)]
                self._tally.answers[scope.get("route_name", "other"), message["status"]] += 1
            return send(message)

        try:
            if path not in OPEN_PATHS:
                self._check_key(headers)
            self._check_length(headers.get(b"content-length", b"0"))
        except (Denied, TooLarge) as error:
            await error_answer(error)(scope, receive, named)
            return
        await self._app(scope, Limited(receive, self._body_max), named)

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        """All keys are compared, each in constant time."""
        if not self._keys:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = headers.get(b"x-api-key", b"")
        matches = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        if not any(matches):
            came = "this API key is not known here" if given.strip() else "no API key came along"
            raise Denied(f"{came}; a valid one is needed: Authorization: Bearer KEY")

    def _check_length(self, length: bytes) -> None:
        if not length.isdigit() or int(length[:20]) > self._body_max:
            raise too_large(self._body_max)


class Limited:
    """Counts the bytes of a body that came without a Content-Length."""

    def __init__(self, receive: Receive, body_max: int) -> None:
        self._receive = receive
        self._left = body_max
        self._body_max = body_max

    async def __call__(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise too_large(self._body_max)
        return message


def too_large(body_max: int) -> TooLarge:
    sentence = f"the body is longer than the {body_max:,} bytes that are read here"
    return TooLarge(f"{sentence}; the server's --body-bytes says how many")
