"""ASGI middleware in front of every route: request id, API key, the body and its length.

Plain ASGI, because it wraps streams too. When a key is set, every path needs it, even paths that do
not exist. Exempt are probes and pages: /chat, /dashboard, /docs, /redoc and their files. A browser
cannot send a key when it opens an address; a page holds no state of this server, asks the user for
the key and sends it with its own requests.

A body is received here, once the key has been checked, and passed on when all of it is there: no
route runs for a part of a body, and a client that leaves before its end is counted and dropped. It
is passed on in pieces: to make one object of 32 MiB takes the event loop tens of milliseconds.

Workers that hand prompts over to one another have a secret and no key: their messages are short,
sealed, and checked by the route.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Collection, Sequence
from typing import Final

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ess.errors import BadInput, EssError
from ess.server.http.openapi import pages
from ess.server.http.origins import check_page, is_allowed, permitted, shared_with
from ess.server.http.request_ids import address, given_key, headers_of
from ess.server.http.responses import Denied, Refused, TooLarge, error_answer
from ess.server.process.bounds import BODIES_MAX, METADATA_BYTES_MAX
from ess.server.process.tally import Tally

PROBES: Final = frozenset({"/health", "/ready", "/ping"})
OPEN_PATHS: Final = PROBES | {"/", "/chat", "/dashboard", *pages.PATHS}
"""Paths for which no key is needed; / sends a browser to /chat."""
SEALED_PATHS: Final = frozenset({"/peers"})
PIECE_BYTES: Final = 16 << 10
"""Pieces are joined up to here, so that a client that sends single bytes makes few."""
PREFLIGHT: Final = b"access-control-request-method"


class Keys:
    """The API keys. A request needs one of them, unless there are none. They may be replaced while
    the server runs."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.replace(keys)

    def replace(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def has(self, given: bytes) -> bool:
        """Compares all keys in constant time, as digests, so that not even their length leaks."""
        digest = _digest(given)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


class Gate:
    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        names: Collection[str],
        body_max: int,
        tally: Tally,
        origins: Collection[str] = (),
    ) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._keys = keys
        self._names = frozenset(name.lower() for name in names)
        self._bodies = Bodies(body_max, tally)
        self._sealed = Bodies(METADATA_BYTES_MAX, tally)
        self._tally = tally

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        state = scope.setdefault("state", {})
        state.update(address(headers))
        origin = headers.get(b"origin", b"")
        allowed = is_allowed(origin, self._origins)
        shared = shared_with(origin, self._origins)

        def named(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    *headers_of(state, scope["path"]),
                    *shared,
                ]
                state["answered"] = (scope.get("route_name", "other"), message["status"])
                state["reason"] = dict(message["headers"]).get(b"x-ess-reason", b"").decode()
                self._tally.answers[state["answered"]] += 1
            return send(message)

        if allowed and scope["method"] == "OPTIONS" and PREFLIGHT in headers:
            allowing = Response(status_code=204, headers=permitted(headers))
            await allowing(scope, receive, named)
            return
        try:
            body = await self._admit(scope, headers, receive, allowed=allowed)
        except EssError as error:
            await error_answer(error, scope)(scope, receive, named)
            return
        if body is None:
            self._tally.answers["other", 499] += 1
            self._tally.disconnect_count += 1
            return
        await self._app(scope, Received(body, receive), named)

    async def _admit(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, *, allowed: bool
    ) -> list[bytes] | None:
        """Checks the request, returns its body: empty on an open path, None if the client left."""
        is_open, is_sealed = scope["path"] in OPEN_PATHS, scope["path"] in SEALED_PATHS
        if self._keys and not (is_open or is_sealed):
            self._check_key(headers)
        elif not (is_open or is_sealed):
            check_page(scope["headers"], self._names, allowed=allowed)
        bodies = self._sealed if is_sealed else self._bodies
        bodies.check_length(headers.get(b"content-length", b"0"))
        has_body = b"transfer-encoding" in headers or b"content-length" in headers
        if is_open or not has_body:
            return []
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise BadInput("the body has a content-encoding: send it without one")
        return await bodies.take(receive)

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        given = given_key(headers)
        if not self._keys.has(given):
            came = "this API key is not known here" if given else "no API key came along"
            raise Denied(f"{came}; a valid one is needed: Authorization: Bearer KEY, or x-api-key")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Bodies:
    """The bodies that are being received; limits each of them and their sum."""

    def __init__(self, body_max: int, tally: Tally) -> None:
        self._body_max = body_max
        self._tally = tally
        self._held = 0

    def check_length(self, length: bytes) -> None:
        if not length.isdigit() or int(length[:20]) > self._body_max:
            raise self._too_large()

    async def take(self, receive: Receive) -> list[bytes] | None:
        """The pieces of a whole body; None if the client left before its end."""
        pieces, length = [b""], 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                piece = message.get("body", b"")
                if len(pieces[-1]) + len(piece) <= PIECE_BYTES:
                    pieces[-1] += piece
                else:
                    pieces.append(piece)
                length += len(piece)
                self._held += len(piece)
                self._check_held(length)
                if not message.get("more_body", False):
                    return pieces
        finally:
            self._held -= length

    def _check_held(self, length: int) -> None:
        if length > self._body_max:
            raise self._too_large()
        if self._held > BODIES_MAX * self._body_max:
            self._tally.refusals["bodies"] += 1
            sentence = f"bodies of {self._held:,} bytes are being received; try again soon"
            raise Refused(sentence, reason="bodies", retry_after_s=1.0)

    def _too_large(self) -> TooLarge:
        sentence = f"the body is longer than the {self._body_max:,} bytes that are read here"
        return TooLarge(f"{sentence}; the server's --body-bytes says how many, but for /peers")


class Received:
    """Gives the pieces of a received body, then whatever else comes from the connection."""

    def __init__(self, pieces: Sequence[bytes], receive: Receive) -> None:
        self._left = list(reversed(pieces)) or [b""]
        self._receive = receive

    async def __call__(self) -> Message:
        if not self._left:
            return await self._receive()
        piece = self._left.pop()
        return {"type": "http.request", "body": piece, "more_body": bool(self._left)}
