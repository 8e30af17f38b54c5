"""A streamed completion as its client sees it: when its pieces came, and what the server counted.

Any server with `/v1/completions` will do. An event is one piece of text; with drafts it may hold
several tokens, so tokens are those that the server counts, and events are counted only where a
server does not say. The event that only ends a stream does not count, so the stream of a prefill
worker, whose tokens another worker makes, may have no events.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import msgspec

from ess.decoding import UNDECODABLE
from ess.errors import BadInput, BadState

ANSWER_S: Final = 600.0
LINE_MAX: Final = 1 << 20
REFUSAL_MAX: Final = 2000


@dataclass(slots=True)
class TimedAnswer:
    """One request. Times are seconds after it was sent; tokens are 0 until the server says them."""

    events_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    counted_tokens: int = 0

    @property
    def first_s(self) -> float:
        return self.events_s[0]

    @property
    def last_s(self) -> float:
        return self.events_s[-1]

    @property
    def gaps_s(self) -> list[float]:
        return [
            after - before for before, after in zip(self.events_s, self.events_s[1:], strict=False)
        ]

    @property
    def output_tokens(self) -> int:
        return self.counted_tokens or len(self.events_s)

    @property
    def token_s(self) -> float | None:
        """Seconds for each token after the first; None if there is no second."""
        further = self.output_tokens - 1
        return (self.last_s - self.first_s) / further if further > 0 else None


async def streamed(url: str, asked: Mapping[str, Any], *, key: str = "") -> TimedAnswer:
    """Sends one request and reads its stream to the end; raises BadState if it is refused or breaks
    off, OSError if there is no connection, TimeoutError after `ANSWER_S`."""
    address, body = address_of(url), json.dumps(asked).encode()
    allowed = f"authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST {address.path}/v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\n"
        f"connection: close\r\ncontent-type: application/json\r\n{allowed}"
        f"content-length: {len(body)}\r\n\r\n"
    )
    begun_s = time.monotonic()
    async with asyncio.timeout(ANSWER_S):
        reader, writer = await asyncio.open_connection(
            address.hostname, address.port, ssl=address.scheme == "https" or None, limit=LINE_MAX
        )
        try:
            writer.write(head.encode() + body)
            return await _read(reader, begun_s)
        finally:
            writer.close()


def address_of(url: str) -> SplitResult:
    """With its port, and without the /v1 that addresses for OpenAI's client end with."""
    try:
        address = urlsplit(url if "://" in url else f"http://{url}")
        is_one = address.scheme in ("http", "https") and address.hostname and address.port != 0
    except ValueError:
        is_one = False
    if not is_one:
        raise BadInput(f"{url!r} is not an address of a server: write http://HOST:PORT")
    usual = 443 if address.scheme == "https" else 80
    netloc = address.netloc if address.port else f"{address.netloc}:{usual}"
    path = address.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return address._replace(netloc=netloc, path=path)


async def _read(reader: asyncio.StreamReader, begun_s: float) -> TimedAnswer:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
    except asyncio.IncompleteReadError:
        raise BadState("the connection closed before an answer") from None
    except asyncio.LimitOverrunError:
        raise BadState(f"the head of the answer is longer than {LINE_MAX:,} bytes") from None
    status = b" ".join(head.split(b"\r\n", 1)[0].split(b" ")[1:2]).decode("latin-1")
    if status != "200":
        reason = _reason(await reader.read(REFUSAL_MAX))
        raise BadState(f"answered {status or 'without a status'}: {reason}")
    seen, is_ended = TimedAnswer(), False
    chunked = b"transfer-encoding: chunked" in head
    async for line in _lines(_chunks(reader) if chunked else _pieces(reader)):
        if line.startswith(b"data: [DONE]"):
            is_ended = True
        elif line.startswith(b"data: "):
            _take(seen, _event_of(line[len(b"data: ") :]), time.monotonic() - begun_s)
    if not is_ended:
        raise BadState(f"the stream broke off after {len(seen.events_s)} events")
    return seen


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


def _event_of(said: bytes) -> _Event:
    try:
        return msgspec.json.decode(said, type=_Event)
    except UNDECODABLE as error:
        raise BadState(f"an event is not one of /v1/completions: {error}") from None


def _take(seen: TimedAnswer, event: _Event, at_s: float) -> None:
    if event.error is not None:
        raise BadState(f"the stream ended with an error: {event.error}"[:REFUSAL_MAX])
    if any(choice.text or not choice.finish_reason for choice in event.choices or ()):
        seen.events_s.append(at_s)
    if event.usage is not None:
        details = event.usage.prompt_tokens_details or _Details()
        seen.prompt_tokens = event.usage.prompt_tokens or 0
        seen.counted_tokens = event.usage.completion_tokens or 0
        seen.cached_tokens = details.cached_tokens or 0


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The body of a chunked answer; a connection that closes inside it ends it."""
    try:
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        return


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(LINE_MAX):
        yield piece


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")


def _reason(body: bytes) -> str:
    """The sentence of a refusal in the form of OpenAI, or its first bytes."""
    at = body.find(b"{")
    try:
        error = json.JSONDecoder().raw_decode(body[max(at, 0) :].decode())[0]["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
