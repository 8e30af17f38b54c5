"""Answers to requests that never reach a route, as bytes for the socket."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

import msgspec


@dataclass(frozen=True, slots=True)
class Refusal:
    """One of our JSON errors, after which the connection is closed."""

    status: bytes
    sentence: str
    kind: str = "invalid_request_error"
    code: str | None = None
    headers: tuple[bytes, ...] = ()

    def answer(self) -> bytes:
        error = {"message": self.sentence, "type": self.kind, "param": None, "code": self.code}
        body = msgspec.json.encode({"error": error})
        head = (
            b"HTTP/1.1 " + self.status,
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
            b"x-request-id: " + secrets.token_hex(16).encode(),
            *self.headers,
        )
        return b"\r\n".join(head) + b"\r\n\r\n" + body


class Stop(Exception):
    """Raised inside the parser's callbacks: the rest of the input is not read."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.sentence)
        self.refusal = refusal


BAD_REQUEST: Final = b"400 Bad Request"
TOO_LONG_HEAD: Final = b"431 Request Header Fields Too Large"

BUSY: Final = Refusal(
    b"503 Service Unavailable",
    "this server holds as many connections as it may",
    kind="overloaded",
    code="connections",
    headers=(b"retry-after: 1", b"x-ess-reason: connections"),
)
NOT_HTTP: Final = Refusal(BAD_REQUEST, "the request is not HTTP/1.1")
UNKNOWN_CODING: Final = Refusal(
    b"501 Not Implemented", "of the transfer-encodings only chunked is read: send the body plain"
)
NO_UPGRADE: Final = Refusal(
    BAD_REQUEST, "this server speaks HTTP/1.1 alone: no WebSocket and no tunnel"
)


def long_head(most: int) -> Refusal:
    return Refusal(TOO_LONG_HEAD, f"the request's line and headers are longer than {most:,} bytes")


def many_headers(most: int) -> Refusal:
    return Refusal(TOO_LONG_HEAD, f"the request has more than {most} headers")


def long_framing(most: int) -> Refusal:
    sentence = f"chunk extensions and trailers of the body are longer than {most:,} bytes"
    return Refusal(BAD_REQUEST, sentence)


def small_chunks(count: int, size: int) -> Refusal:
    sentence = f"the body comes in chunks that are too small: {count:,} for {size:,} bytes"
    return Refusal(BAD_REQUEST, sentence)


def many_pipelined(most: int) -> Refusal:
    return Refusal(BAD_REQUEST, f"more than {most} requests came before the first was answered")


def late_body(least: int) -> Refusal:
    return Refusal(b"408 Request Timeout", f"the body came slower than {least:,} bytes per second")
