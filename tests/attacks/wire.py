"""HTTP by hand: what no client library would send, and what comes back."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from collections.abc import Iterable

MIB = 1 << 20
ENDLESS = {"type": "integer", "multipleOf": 99999989}
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


def head(path: str = "/version", *headers: str, method: str = "GET") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", *headers, "", ""]
    return "\r\n".join(lines).encode()


def post(body: bytes, *headers: str) -> bytes:
    return head("/v1/completions", f"content-length: {len(body)}", *headers, method="POST") + body


def completion(**changed: object) -> bytes:
    return json.dumps({"model": "test-model", "prompt": "x", "max_tokens": 2, **changed}).encode()


def pour(made: socket.socket, pieces: Iterable[bytes]) -> int:
    """Bytes sent until the other side had enough."""
    sent = 0
    with contextlib.suppress(ConnectionError, TimeoutError):
        for piece in pieces:
            made.sendall(piece)
            sent += len(piece)
    return sent


def rest(made: socket.socket) -> bytes:
    """All that comes until the connection ends."""
    told = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := made.recv(1 << 16):
            told += piece
    return bytes(told)


def reply(made: socket.socket) -> tuple[int, dict]:
    """One answer; the connection may go on."""
    with http.client.HTTPResponse(made) as answer:
        answer.begin()
        return answer.status, json.loads(answer.read())


def parsed(told: bytes) -> tuple[int, dict]:
    lines, _, body = told.partition(b"\r\n\r\n")
    return int(lines[9:12]), json.loads(body)["error"]


def chunk(size: int) -> bytes:
    return b"%x\r\n%b\r\n" % (size, b" " * size)


def listed(name: str, what: str, count: int) -> bytes:
    return f'{{"{name}":[{",".join([what] * count)}]}}'.encode()


FRAMINGS = {
    "trailers": [CHUNKED, b"0\r\n", *[b"t: " + b"v" * 1000 + b"\r\n"] * 100_000],
    "small-trailers": [CHUNKED, b"0\r\n", *[b"t: v\r\n" * 10_000] * 1_700],
    "endless-trailer": [CHUNKED, b"0\r\nt: ", *[b"v" * MIB] * 100],
    "extension": [CHUNKED, b"1;e=", *[b"v" * MIB] * 100],
    "extensions": [CHUNKED, *[b"1;" + b"e" * 1000 + b"\r\nx\r\n"] * 100_000],
    "trailers-between": [CHUNKED + b"0\r\n" + b"t: v\r\n" * 30 + b"\r\n"] * 300_000,
    "request-line": [b"GET /", *[b"x" * MIB] * 100],
    "headers": [b"GET / HTTP/1.1\r\n", *[b"a:\r\n" * 1000] * 10_000],
    "blank-lines": [b"\r\n" * 1000] * 50_000,
    "requests-behind": [head("/dashboard") * 20_000] * 60,
}
ONE_BYTE_CHUNKS = [*[b"1\r\n \r\n" * 100_000] * 20, b"0\r\n\r\n"]
