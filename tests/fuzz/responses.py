"""Reads what a server has answered on a connection, and refuses what is not HTTP/1.1."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.fuzz.fuzzer import Finding

STATUSES = {
    *(100, 200, 204, 304, 307, 400, 401, 403, 404, 405, 406, 408, 409, 411, 413, 414, 415, 417),
    *(421, 422, 426, 431, 501, 503),
}
STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d{3}) [\x20-\x7e]*")
FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\x80-\xff\t]*)")


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: dict[bytes, bytes]
    body: bytes
    is_whole: bool = True


def responses(raw: bytes, *, has_heads: bool) -> list[Response]:
    """With `has_heads` an answer may be one to a HEAD, which has a length and no body."""
    read = []
    while raw:
        head, mark, rest = raw.partition(b"\r\n\r\n")
        if not mark:
            read.append(Response(0, {}, raw, is_whole=False))
            return read
        status, headers = _head(head)
        response, raw = _body(status, headers, rest, has_heads=has_heads)
        read.append(response)
    return read


def check_status(response: Response, *, place: str) -> None:
    if response.status not in STATUSES:
        raise Finding(f"status {response.status}", place, repr(response.body[:500]))
    if response.status == 503 and not response.headers.get(b"x-ess-reason"):
        raise Finding("503 without a reason", place, repr(response.body[:500]))


def _head(head: bytes) -> tuple[int, dict[bytes, bytes]]:
    first, *lines = head.split(b"\r\n")
    line = STATUS_LINE.fullmatch(first)
    if line is None:
        raise Finding("not HTTP", "status line", repr(first[:200]))
    headers: dict[bytes, bytes] = {}
    for text in lines:
        matched = FIELD.fullmatch(text)
        if matched is None:
            raise Finding("not HTTP", "header", repr(text[:200]))
        name = matched[1].lower()
        if name in headers and name in (b"content-length", b"x-request-id", b"content-type"):
            raise Finding("not HTTP", f"two of {name.decode()}", repr(head[:500]))
        headers[name] = matched[2].strip()
    return int(line[1]), headers


def _body(
    status: int, headers: dict[bytes, bytes], rest: bytes, *, has_heads: bool
) -> tuple[Response, bytes]:
    if status < 200 or status in (204, 304):
        return Response(status, headers, b""), rest
    if has_heads and (not rest or rest.startswith(b"HTTP/1.1 ")):
        return Response(status, headers, b""), rest
    if headers.get(b"transfer-encoding") == b"chunked":
        return _chunked(status, headers, rest)
    length = headers.get(b"content-length", b"")
    if not length and headers.get(b"connection") == b"close":  # of a stream for HTTP/1.0
        return Response(status, headers, rest), b""
    if not length.isdigit():
        raise Finding("not HTTP", "no length", f"{status} {headers}")
    size = int(length)
    is_whole = len(rest) >= size
    return Response(status, headers, rest[:size], is_whole), rest[size:]


def _chunked(status: int, headers: dict[bytes, bytes], rest: bytes) -> tuple[Response, bytes]:
    body = bytearray()
    while True:
        size, mark, after = rest.partition(b"\r\n")
        if mark and not re.fullmatch(rb"[0-9a-fA-F]{1,8}", size):
            raise Finding("not HTTP", "chunk size", repr(size[:100]))
        count = int(size, 16) if mark else 0
        if not mark or len(after) < count + 2:
            return Response(status, headers, bytes(body + rest), is_whole=False), b""
        if after[count : count + 2] != b"\r\n":
            raise Finding("not HTTP", "chunk end", repr(after[count : count + 20]))
        body += after[:count]
        rest = after[count + 2 :]
        if not count:
            return Response(status, headers, bytes(body)), rest
