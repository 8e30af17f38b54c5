"""Target `http`: bytes on a connection, in pieces, with a client that stalls and leaves.

    {"ops": [["bytes", text], ["many", text, count], ["turns", count], ["stall"], ["go"],
             ["leave"], ["reset"]]}

Texts are bytes as Latin-1. Whatever comes, every byte of the answer is HTTP, nothing is logged as
an error, a connection holds little, and nothing stays when it is gone.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from tests.fuzz import values
from tests.fuzz.fuzzer import Finding, Value
from tests.fuzz.responses import Response, check_status, responses
from tests.fuzz.rig import Connection
from tests.fuzz.served import ServedTarget, check_held

METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "CONNECT", "PRI", "BREW", "")
VERSIONS = ("HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9", "")
ENDS = ("\r\n", "\r\n", "\r\n", "\r\n", "\n", "\r", "\r\n\r\n", "\r\n ")
HEADS = (
    *("content-type: application/json", "expect: 100-continue", "connection: close"),
    *("connection: keep-alive", "connection: upgrade", "upgrade: websocket", "upgrade: h2c"),
    *("transfer-encoding: chunked", "transfer-encoding: gzip, chunked", "transfer-encoding : x"),
    *("content-length: 0", "content-length: 5", "content-length: -1", "content-length: 1e3"),
    *("content-length: 99999999999999999999", "content-length: +5", "content-length: 5, 5"),
    *("x-request-id: mine", "x-request-id: a b", "x-session-id: s", "authorization: Bearer k"),
    *("x-session-id: \x7f", "x-request-id: \xff\xfe", "origin: http://example.com", "te: trailers"),
    "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    *("host: a\r\nhost: b", "host:", "x: " + "y" * 5000, "sec-fetch-site: cross-site", ":", " x"),
    *("sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==", "sec-websocket-version: 13", "cookie: a=b"),
    *("accept-encoding: gzip", "range: bytes=0-1", "if-none-match: *", "x\x00y: z", "x: a\x00b"),
)
PATHS = ("/", "*", "http://a/health", "/health?x=%ff", "/%ff%fe", "//health", "/health/", "/\x80")
TOKENS = (
    *HEADS,
    *(
        "\r\n",
        "\r\n\r\n",
        "\n",
        "\r",
        "\x00",
        " ",
        "\t",
        ":",
        "0\r\n\r\n",
        "0\r\n",
        "5\r\nabcde\r\n",
    ),
    *("5;a=b\r\nabcde\r\n", "ffffffffffffffff\r\n", "-1\r\n", "x: y\r\n", "GET / HTTP/1.1\r\n\r\n"),
    *("HTTP/1.1", "HTTP/1.0", "\x16\x03\x01", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "%00", "\x80"),
)
TURNS_MAX = 60
COUNTS = (3, 100, 3000, 20_000)


class HttpBytes(ServedTarget):
    name = "http"
    patterns = ("server/http/**/*.py",)

    def begin(self) -> None:
        self._paths = sorted(self.document["paths"])

    # ---- inputs

    def fresh(self, source: random.Random) -> Value:
        raw = "".join(self._request(source) for _ in range(source.choice((1, 1, 1, 2, 4))))
        ops: list[Any] = [["bytes", raw]]
        for _ in range(source.choice((0, 0, 1, 3))):
            ops = _changed_ops(source, ops)
        return {"ops": ops}

    def changed(self, source: random.Random, value: Value, other: Value) -> Value:
        if source.random() < 0.15:
            cut = source.randrange(len(value["ops"]) + 1)
            return {"ops": value["ops"][:cut] + other["ops"][cut:]}
        return {"ops": _changed_ops(source, value["ops"])}

    def _request(self, source: random.Random) -> str:
        path = source.choice((*self._paths, *self._paths, *PATHS))
        posts = "post" in self.document["paths"].get(path, {})
        method = "POST" if posts else "GET"
        method = method if source.random() < 0.8 else source.choice(METHODS)
        lines = [f"{method} {path} {source.choice(VERSIONS)}", "host: localhost"]
        lines += source.sample(HEADS, source.choice((0, 0, 1, 2, 4)))
        body = self._body(source) if method == "POST" else ""
        if body and source.random() < 0.5:
            lines.append("transfer-encoding: chunked")
            body = _chunked(source, body)
        elif body:
            lines.append(f"content-length: {len(body) + source.choice((0, 0, 0, 0, -1, 1, 50))}")
        end = "\r\n" if source.random() < 0.9 else source.choice(ENDS)
        return end.join(lines) + end + end + body

    def _body(self, source: random.Random) -> str:
        body = {"prompt": "abc"[: source.randrange(4)], "text": "a", "max_tokens": 8}
        body |= {"messages": [{"role": "user", "content": "a"}], "token_ids": [5, 6], "tokens": [5]}
        body |= {"stream": source.random() < 0.6}
        return json.dumps(body)

    # ---- running

    async def talk(self, value: Value) -> list[Response]:
        connection, protocol = self._rig.connect()
        raw = ""
        for op in value["ops"]:
            raw += op[1] if op[0] in ("bytes", "many") else ""
            await _do(connection, op)
            check_held(protocol)
        await _settle(protocol, turns_max=10 if "events" in raw else TURNS_MAX)
        check_held(protocol)
        connection.stall(is_stalled=False)
        await asyncio.sleep(0)
        connection.leave(is_reset=False)
        await self._rig.drained()
        answers = responses(bytes(connection.written), has_heads="HEAD" in raw)
        if answers and not answers[-1].is_whole and not _may_be_cut(connection, answers[-1]):
            raise Finding("not HTTP", "cut short", repr(connection.written[-300:]))
        return answers

    def judge(self, value: Value, answers: list[Response]) -> None:
        for answer in answers:
            if not answer.status:
                continue
            check_status(answer, place=_route(answer))
            if answer.status >= 200 and not answer.headers.get(b"x-request-id"):
                raise Finding("no x-request-id", f"status {answer.status}", repr(answer.headers))


def _may_be_cut(connection: Connection, last: Response) -> bool:
    """A client that leaves gets half an answer, and so does a client that sends what is no request
    behind the request whose stream has begun: a refusal has no place inside of a stream."""
    is_stream = last.headers.get(b"transfer-encoding") == b"chunked"
    return connection.is_cut or (is_stream and connection.is_closed_by_input)


def _route(answer: Response) -> str:
    try:
        return str(json.loads(answer.body)["error"]["type"])
    except (ValueError, KeyError, TypeError):
        return "http"


async def _do(connection: Connection, op: list[Any]) -> None:
    match op:
        case ["bytes", text]:
            connection.feed(text.encode("latin-1", "replace"))
        case ["many", text, count]:
            for _ in range(count):
                connection.feed(text.encode("latin-1", "replace"))
        case ["turns", count]:
            for _ in range(count):
                await asyncio.sleep(0)
        case ["stall"]:
            connection.stall(is_stalled=True)
        case ["go"]:
            connection.stall(is_stalled=False)
        case ["leave"]:
            connection.leave(is_reset=False)
        case ["reset"]:
            connection.leave(is_reset=True)


async def _settle(protocol: Any, *, turns_max: int) -> None:
    """Until the answer is complete, the rest of the request is missing, or it takes too long."""
    patience = 12
    for turn in range(turns_max):
        cycle = protocol.cycle
        if protocol.transport.is_over or cycle is None or cycle.response_complete:
            break
        patience -= bool(cycle.more_body)
        if not patience:
            break
        await asyncio.sleep(0 if turn < turns_max // 2 else 0.001)
    for _ in range(3):
        await asyncio.sleep(0)


def _chunked(source: random.Random, body: str) -> str:
    text = ""
    while body:
        size = source.randrange(1, len(body) + 1)
        extension = source.choice(("", "", ";a=b", ";" + "x" * 200, ' ;a="\\""'))
        text += f"{size:x}{extension}\r\n{body[:size]}\r\n"
        body = body[size:]
    trailers = source.choice(("", "", "x: y\r\n", "content-length: 5\r\n", "x: y\r\n" * 20))
    return f"{text}0\r\n{trailers}\r\n"


def _changed_ops(source: random.Random, ops: list[Any]) -> list[Any]:
    at = source.randrange(len(ops) + 1)
    extra = ["turns", source.choice((1, 2, 5, 20))], ["stall"], ["go"], ["leave"], ["reset"]
    if at == len(ops) or source.random() < 0.2:
        return [*ops[:at], source.choice(extra), *ops[at:]][:40]
    op = ops[at]
    if op[0] not in ("bytes", "many") or source.random() < 0.1:
        return [*ops[:at], *ops[at + 1 :]] or [["bytes", ""]]
    if op[0] == "many" and source.random() < 0.5:
        return [*ops[:at], [*op[:2], source.choice(COUNTS)], *ops[at + 1 :]]
    if source.random() < 0.3:
        return [*ops[:at], *_cut_up(source, op[1]), *ops[at + 1 :]][:40]
    text = values.raw_changed(source, op[1], TOKENS)[:20_000]
    return [*ops[:at], [op[0], text, *op[2:]], *ops[at + 1 :]]


def _cut_up(source: random.Random, text: str) -> list[Any]:
    """In two, or with a line or a chunk that comes again and again at a place of its kind."""
    cut = source.randrange(len(text) + 1)
    if source.random() < 0.5:
        return [["bytes", text[:cut]], ["bytes", text[cut:]]]
    ends = {
        text.find(mark) + len(mark) for mark in ("\r\n", "\r\n\r\n", "\r\n0\r\n") if mark in text
    }
    cut = source.choice([0, cut, text.rfind("\r\n", 0, cut) + 2, *sorted(ends)])
    repeated = source.choice(
        ("x-more: yyyyyyyyyyyyyyyyyyyy\r\n", "5\r\nabcde\r\n", "\r\n", "a" * 99)
    )
    count = source.choice(COUNTS)
    return [["bytes", text[:cut]], ["many", repeated, count], ["bytes", text[cut:]]]
