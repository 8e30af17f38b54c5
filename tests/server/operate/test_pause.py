"""Generation that is paused and goes on, in the words of vLLM and of SGLang."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from ess.clock import RealClock
from ess.engine.process import fake_engine
from ess.engine.process.messages import Ready
from ess.engine.process.wire import SocketWire
from ess.server.process.board import Board
from ess.server.process.link import EngineLink
from ess.server.process.requests.open_calls import FrontPlace
from ess.server.process.service import Limits
from tests.server.harness import PacedEngine, Served, counting, until
from tests.server.test_fronts import fronts
from tests.server.test_origins import exchange
from tests.support.process import Process

SHORT = {"prompt": "a", "ignore_eos": True, "max_tokens": 5}
LIMITS = Limits(running_max=16, waiting_max=64, length_max=4096, keep_alive_s=0.05)


@pytest.fixture
def served() -> Iterator[Served]:
    with Served(PacedEngine(counting(4000), pace_s=0.002), limits=LIMITS) as served:
        yield served


def post(served: Served, path: str, body: Any = None) -> tuple[int, Any]:
    status, _, raw = exchange(served, "POST", path, body)
    return status, json.loads(raw)


def made_count(served: Served) -> int:
    return served.engine._made_count


def begin(served: Served, **asked: Any) -> Iterator[bytes]:
    """The lines of a stream that has begun once the first of them was taken."""
    body = {"prompt": [7] * 4, "ignore_eos": True, "stream": True, "max_tokens": 300, **asked}
    request = urllib.request.Request(f"{served.url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as lines:
        next(line for line in lines if line.startswith(b"data: "))
        yield b""
        yield from lines


@pytest.mark.parametrize(
    ("stop", "body", "go_on"),
    [
        ("/pause?mode=keep", None, "/resume"),
        ("/pause_generation", {"mode": "in_place"}, "/continue_generation"),
    ],
    ids=["vllm", "sglang"],
)
def test_streams_wait_and_go_on_where_they_were(served: Served, stop: str, body: Any, go_on: str):
    lines = begin(served)
    next(lines)
    assert post(served, stop, body)[0] == 200
    before = made_count(served)
    assert json.loads(exchange(served, "GET", "/is_paused")[2]) == {"is_paused": True}
    silent = 0
    while silent < 5:  # what was under way, then comments alone
        silent = silent + 1 if next(lines).startswith(b": keep-alive") else silent
    late: Future[Any] = ThreadPoolExecutor(1).submit(lambda: post(served, "/v1/completions", SHORT))
    until(lambda: served.service.open_count == 2, "a request that comes meanwhile")
    assert made_count(served) == before
    status, headers, raw = exchange(served, "GET", "/ready")
    assert (status, headers["x-ess-reason"]) == (503, "paused")
    assert "/continue_generation lets it go on" in json.loads(raw)["error"]["message"]
    assert exchange(served, "GET", "/health_generate")[0] == 503
    assert json.loads(exchange(served, "GET", "/health")[2])["status"] == "paused"
    assert b"ess_paused 1.0" in exchange(served, "GET", "/metrics")[2]
    assert post(served, go_on)[0] == 200
    assert exchange(served, "GET", "/ready")[0] == 200
    assert json.loads(exchange(served, "GET", "/is_paused")[2]) == {"is_paused": False}
    assert b'"finish_reason":"length"' in b"".join(lines)
    assert late.result()[1]["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("stop", "body", "flush_count"),
    [
        ("/pause", None, 1),
        ("/pause?mode=abort&clear_cache=false", None, 0),
        ("/pause_generation", {}, 0),
        ("/pause_generation", None, 0),
    ],
)
def test_an_abort_ends_what_is_open(served: Served, stop: str, body: Any, flush_count: int):
    lines = begin(served)
    next(lines)
    assert post(served, stop, body)[0] == 200
    assert b'"finish_reason":"abort"' in b"".join(lines)
    assert served.service.open_count == 0
    assert served.engine.flushes == flush_count
    assert post(served, "/flush_cache") == (200, {"flushed": True})
    assert post(served, "/pause")[0] == 200, "once more"
    assert post(served, "/resume") == (200, {"status": "resumed"})
    client = served.client()
    made = client.completions.create(model="test-model", prompt="a", max_tokens=3)
    assert made.usage is not None
    assert made.usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("stop", "body", "why"),
    [
        ("/pause?mode=wait", None, "mode is 'wait', .* pause when /load says 0"),
        ("/pause?mode=in_place", None, "mode is 'in_place', .* abort and keep are"),
        ("/pause?clear_cache=perhaps", None, "clear_cache is 'perhaps'"),
        ("/pause?mode=keep&clear_cache=true", None, "clear_cache is true and mode is keep"),
        ("/pause?wait_for_inflight_requests=true", None, "wait_for_inflight_requests is not"),
        ("/pause_generation", {"mode": "retract"}, "mode is 'retract', .* take in_place"),
        ("/pause_generation", {"mode": 7}, "mode: expected `str`"),
        ("/pause_generation", [], "the body: expected `object`"),
    ],
)
def test_what_is_refused_pauses_nothing(served: Served, stop: str, body: Any, why: str):
    status, document = post(served, stop, body)
    assert status == 400
    assert re.match(why, document["error"]["message"]), document
    assert json.loads(exchange(served, "GET", "/is_paused")[2]) == {"is_paused": False}


def test_an_engine_that_loads_cannot_be_paused():
    with Served(PacedEngine(counting(4), says_ready=False)) as served:
        for path in ("/pause", "/resume", "/pause_generation", "/continue_generation"):
            assert post(served, path)[0] == 503


@pytest.mark.slow
def test_a_pause_holds_for_every_process_and_for_the_next_engine():
    flags = ("--engine", "paced", "--pace-ms", "2", "--server-processes", "2")
    with Process(*flags, "--recover", "resume").wait_ready() as process:
        until(lambda: len(fronts(process)) == 1, "the other process")

        def asked(path: str, method: str = "POST") -> Any:
            request = urllib.request.Request(process.url + path, method=method)
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)

        def said() -> set[bool]:
            return {asked("/is_paused", "GET")["is_paused"] for _ in range(20)}

        def renewed() -> set[bool]:
            """Whether each process is paused with the second engine."""
            pages = [urllib.request.urlopen(process.url + "/metrics").read() for _ in range(20)]
            wanted = (b"ess_up 1.0", b"ess_paused 1.0", b"ess_engine_restarts_total 1.0")
            return {all(line in page for line in wanted) for page in pages}

        stream = process.stream(max_tokens=1000)
        next(stream)
        asked("/pause?mode=keep")
        until(lambda: said() == {True}, "a word of both processes")
        process.kill_engine()
        until(lambda: renewed() == {True}, "the next engine")
        asked("/resume")
        assert sum(1 for _ in stream) > 100
        until(lambda: said() == {False}, "a word of both processes")


def test_a_process_that_hears_late_of_the_next_engine_does_not_pause_it_again(tmp_path: Path):
    """Two processes of a server know of a pause; its engine is lost. One of them hears of the next
    engine first, and lets a client's resume through."""

    async def run() -> None:
        context, clock = zmq.asyncio.Context(), RealClock()
        links = [
            EngineLink(
                context,
                f"ipc://{tmp_path}/first-{front}",
                board=Board(clock),
                clock=clock,
                place=FrontPlace(front=front, count=2),
            )
            for front in range(2)
        ]
        early, late = links

        async def turns(engine: fake_engine.PacedEngine, wire: SocketWire) -> None:
            while True:
                engine.turn(wire)
                await asyncio.sleep(0)

        def begun(name: str) -> tuple[SocketWire, asyncio.Task[None]]:
            endpoints = [f"ipc://{tmp_path}/{name}-{front}" for front in (0, 1)]
            wire = SocketWire(zmq.Context.instance(), endpoints)
            wire.give(Ready(vocabulary=10, length_max=10, load_s=0.0))
            engine = fake_engine.PacedEngine(fake_engine.walking(512))
            return wire, asyncio.ensure_future(turns(engine, wire))

        async def come_true(true: Callable[[], bool]) -> None:
            while not true():
                await asyncio.sleep(0.001)

        wire, engine = begun("first")
        hearing = [asyncio.ensure_future(link.run()) for link in links]
        await come_true(lambda: all(link.engine.state == "ready" for link in links))
        await early.hold(is_on=True)
        await come_true(lambda: late.engine.is_held)
        for task in (engine, *hearing):
            task.cancel()
        await asyncio.gather(engine, *hearing, return_exceptions=True)
        wire.close()
        for front, link in enumerate(links):
            link.interrupt("it broke")
            link.renew(f"ipc://{tmp_path}/second-{front}")
        assert early.engine.is_held
        assert late.engine.is_held
        wire, engine = begun("second")
        hearing = [asyncio.ensure_future(early.run())]
        await come_true(lambda: early.engine.state == "ready")
        assert early.engine.is_held, "the pause goes over to the next engine"
        await early.hold(is_on=False)
        hearing.append(asyncio.ensure_future(late.run()))
        await come_true(lambda: late.engine.state == "ready" and not late.engine.is_held)
        await late.flush()  # the engine has obeyed all that came before
        heard_at_s = early.engine.heard_at_s
        await come_true(lambda: early.engine.heard_at_s > heard_at_s + 0.15)
        assert not early.engine.is_held
        assert not late.engine.is_held
        for task in (engine, *hearing):
            task.cancel()
        await asyncio.gather(engine, *hearing, return_exceptions=True)
        wire.close()
        for link in links:
            link.check()
            link.close()
        context.destroy(linger=0)

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.slow
@pytest.mark.parametrize("count", ["1", "2"])
def test_a_drain_ends_a_pause_so_that_what_is_open_can_finish(count: str):
    """While it drains no other pause is let in, or that ends too."""
    flags = ("--engine", "paced", "--pace-ms", "2", "--server-processes", count)
    with Process(*flags, "--drain-s", "240").wait_ready() as process:

        def asked(path: str) -> int:
            ask = urllib.request.Request(process.url + path, method="POST")
            try:
                with urllib.request.urlopen(ask, timeout=60) as answer:
                    return answer.status
            except urllib.error.HTTPError as error:
                return error.code
            except (urllib.error.URLError, ConnectionError):
                return 0

        stream = process.stream(max_tokens=500)
        next(stream)
        assert asked("/pause?mode=keep") == 200
        process.process.send_signal(signal.SIGTERM)
        until(lambda: process.status("/ready") in (503, 0), "the drain")
        late = asked("/pause?mode=keep")
        assert late in (503, 0) or (late, count) == (200, "2"), "it had not heard of the drain"
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert process.ended(60) == 0
        said = process.process.communicate()[1]
        assert "generation was paused; it goes on, so that requests can finish" in said
