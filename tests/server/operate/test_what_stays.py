"""Requests of every kind leave the server's process as it was: objects, tasks, threads, files."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import threading
from collections import Counter
from typing import Any

import pytest

from tests.server.harness import PacedEngine, Served, counting, until

MODEL, TALK = {"model": "test-model"}, [{"role": "user", "content": "hello"}]
FEW, OBJECT = {"max_tokens": 3}, {"type": "json_object"}
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": "one", "stop": ["x"], "seed": 3, **FEW}),
    ("/v1/completions", {"prompt": "one", "stream": True, **FEW}),
    ("/v1/completions", {"prompt": ["one", "two"], "n": 2, "stream": True, **FEW}),
    ("/v1/completions", {"prompt": "one", "max_tokens": -1}),
    ("/v1/chat/completions", {"messages": TALK, "stream": True, **FEW}),
    ("/v1/chat/completions", {"messages": TALK, "response_format": OBJECT, **FEW}),
    ("/v1/chat/completions", {"messages": [{"role": "nobody"}]}),
    ("/v1/messages", {"messages": TALK, **FEW}),
    ("/v1/messages", {"messages": TALK, "stream": True, **FEW}),
    ("/v1/responses", {"input": "one", "store": False, "max_output_tokens": 3}),
    ("/generate", {"text": "one", "sampling_params": {"max_new_tokens": 2}, "stream": True}),
    ("/generate", {"text": "one", "sampling_params": {"regex": "("}}),
    ("/tokenize", {"prompt": "one"}),
    ("/abort_request", {"rid": "nobody"}),
    ("/v1/nothing", {}),
)
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
OURS = ("ess.", "asyncio", "_asyncio", "uvicorn", "starlette", "fastapi", "uvloop")
OF_A_MINUTE = "ess.engine.process.messages."
"""The board keeps what the engine says of itself, for a minute."""

OF_A_WAIT = (
    "_asyncio.Future",
    "_asyncio.FutureIter",
    "uvloop.loop.TimerHandle",
    "uvloop.loop.UVTimer",
)
OF_A_MOMENT = Counter(dict.fromkeys(OF_A_WAIT, 2))
"""A task of the server's own may wait at one look, and not at another. What a kind of request
leaves is there 18 times."""


async def sent(port: int, path: str, body: bytes) -> Connection:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    length = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write((head + length).encode() + body)
    return reader, writer


async def ask(port: int, path: str, body: bytes) -> None:
    reader, writer = await sent(port, path, body)
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 "), answer
    writer.close()


async def left(port: int, body: bytes, *, has_begun: bool) -> None:
    reader, writer = await sent(port, "/v1/completions", body)
    if has_begun:
        await reader.readuntil(b"data: ")
    writer.transport.abort()


async def ask_all(port: int, count: int, seed: int) -> None:
    """Of each kind one at a time; some bodies are cut short, and some clients leave long answers,
    or before there is one."""
    draw = random.Random(seed)
    for _ in range(count):
        asking = []
        for path, fields in ASKED:
            body = json.dumps({**MODEL, **fields}).encode()
            asking.append(ask(port, path, body[: len(body) // draw.choice((1, 1, 1, 2))]))
        for is_stream in (True, False):
            endless = {**MODEL, "prompt": "one", "max_tokens": 3000, "stream": is_stream}
            asking.append(left(port, json.dumps(endless).encode(), has_begun=is_stream))
        await asyncio.gather(*asking)


def there(served: Served) -> Counter[str]:
    """Of the whole process. What the engine here records is the test's own."""
    served.engine.adds.clear()
    gc.collect()
    kinds = Counter(
        f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects()
    )
    for name in [*kinds]:
        if not name.startswith(OURS) or name.startswith(OF_A_MINUTE):
            del kinds[name]
    return kinds + Counter(threads=threading.active_count(), files=len(os.listdir("/proc/self/fd")))


@pytest.mark.slow
def test_nothing_grows_with_the_number_of_requests() -> None:
    with Served(PacedEngine(counting(4000))) as served:
        asyncio.run(ask_all(served.port, 6, seed=1))
        until(lambda: not served.connections and not served.service.open_count, "the warm-up")
        before = there(served)
        asyncio.run(ask_all(served.port, 18, seed=2))
        grown = Counter[str]()

        def is_as_before() -> bool:
            nonlocal grown
            grown = there(served) - before - OF_A_MOMENT
            return not grown

        with contextlib.suppress(AssertionError):
            until(is_as_before, within_s=20.0)
    assert not grown
