"""Several server processes before one engine: real processes, the kernel's own division of work."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest

from ess.engine.process.messages import Ready
from ess.server.commands.start.front import Front
from ess.server.process.child import Child, End
from ess.server.process.engines.engine_state import EngineState
from ess.server.process.fronts import Fronts, Start
from ess.server.process.requests.open_calls import FrontPlace
from tests.server.harness import until
from tests.server.test_dashboard import metrics
from tests.support.crowd import Crowd
from tests.support.few import few
from tests.support.kin import children, commands, is_running, worker_of
from tests.support.manual_clock import ManualClock
from tests.support.process import Process

PACED = ("--engine", "paced", "--max-running", "64", "--max-waiting", "64")
COUNT = 3
STREAMS = 24
ENDLESS = {"prompt": [5, 6, 7], "max_tokens": 1900, "ignore_eos": True}


def fronts(process: Process) -> list[int]:
    return [pid for pid, words in commands(process.process.pid).items() if "front" in words]


@contextlib.contextmanager
def several(*flags: str, **given: bool) -> Iterator[Process]:
    paced = ("--pace-ms", "20") if "--pace-ms" not in flags else ()
    words = (*PACED, *paced, "--server-processes", str(COUNT), *flags)
    with Process(*words, **given).wait_ready() as process:
        until(lambda: len(fronts(process)) == COUNT - 1, "all processes")
        all_are_ready(process)
        yield process


def all_are_ready(process: Process) -> None:
    """Each process accepts connections itself, and is ready: that a process is never met has a
    chance of one in ten million."""
    until(lambda: all(is_ready(process) for _ in range(40)), "all being ready")


def is_ready(process: Process) -> bool:
    """Not so where the first process has accepted the connection for another, which it closes."""
    connection = http.client.HTTPConnection("127.0.0.1", process.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        return answer.status == 200 and answer.getheader("connection") != "close"


def is_replaced(process: Process, pid: int) -> None:
    until(lambda: len({*fronts(process)} - {pid}) == COUNT - 1, "another process")
    all_are_ready(process)


def crowd(process: Process, count: int = STREAMS) -> Crowd:
    return Crowd(process.url, [ENDLESS] * count)


def all_have_begun(going: Crowd) -> None:
    until(lambda: all(b'"text"' in text for text in going.texts), "every stream's first token")


def all_are_over(going: Crowd) -> None:
    """What the server has sent may be read after its end."""
    until(lambda: all(map(going.is_over, range(len(going.texts)))), "every stream's end")


def post(process: Process, path: str, document: object = None) -> dict:
    body = json.dumps(document or {}).encode()
    with urllib.request.urlopen(process.url + path, body, timeout=60) as answer:
        return json.load(answer)


def running(process: Process) -> float:
    return metrics(process.url)["ess_requests_running", ""]


@pytest.mark.slow
def test_every_process_serves_and_each_answers_for_all():
    with several(has_real_children=True) as process, crowd(process) as going:
        all_have_begun(going)
        held = [len(os.listdir(f"/proc/{pid}/fd")) for pid in fronts(process)]
        assert min(held) < 24 + STREAMS, "no process has all"
        until(lambda: running(process) == STREAMS, "all streams in one count")
        until(
            lambda: all(metrics(process.url)["ess_connections", ""] > STREAMS for _ in range(8)),
            "all connections in one count, whichever is asked",
        )
        assert post(process, "/trace/start") == {"tracing": True}
        for _ in range(2 * COUNT):
            with pytest.raises(urllib.error.HTTPError, match="409"):
                post(process, "/trace/start")
        assert "traceEvents" in post(process, "/trace/stop")
        assert post(process, "/abort_request", {"rid": "crowd-07"}) == {"aborted": 1}
        until(lambda: going.is_over(7), "the stream that was aborted by its id")
        assert b'"finish_reason":"abort"' in going.texts[7]
        assert post(process, "/abort_request", {"abort_all": True}) == {"aborted": STREAMS - 1}
        all_are_over(going)
        assert all(b'"finish_reason":"abort"' in text for text in going.texts)
        until(
            lambda: all(
                metrics(process.url).get(("ess_finished_total", "abort")) == STREAMS
                for _ in range(8)
            ),
            "every end in one count, whichever is asked",
        )


@pytest.mark.slow
def test_a_process_that_is_killed_costs_its_own_streams_and_is_replaced():
    with several() as process, crowd(process) as going:
        all_have_begun(going)
        victim, *others = fronts(process)
        os.kill(worker_of(victim), signal.SIGKILL)  # its socket to the engine is free at once
        until(lambda: any(map(going.is_over, range(STREAMS))), "the streams that it had")
        until(lambda: running(process) < STREAMS, "the engine's giving up of its requests")
        over = partial(map, going.is_over, range(STREAMS))
        until(lambda: sum(over()) == STREAMS - running(process), "the end of all that it had")
        left = [number for number, is_over in enumerate(over()) if not is_over]
        assert 0 < len(left) < STREAMS
        before = [len(going.texts[number]) for number in left]
        until(
            lambda: all(len(going.texts[n]) > b for n, b in zip(left, before, strict=True)),
            "the other streams' going on",
        )
        is_replaced(process, victim)
        assert victim not in fronts(process)
        assert set(others) <= set(fronts(process))
        with crowd(process) as more:
            all_have_begun(more)
        assert running(process) <= len(left) + STREAMS
        until(
            lambda: metrics(process.url)["ess_connections", ""] <= len(left) + 1,
            "the end of all connections but those of the streams that are left",
        )


@pytest.mark.slow
def test_a_process_that_is_stuck_is_replaced_and_the_others_go_on():
    flags = ("--pace-ms", "1")
    with several(*flags, has_real_children=True) as process, crowd(process) as going:
        all_have_begun(going)
        stuck = fronts(process)[0]
        os.kill(stuck, signal.SIGSTOP)
        with crowd(process, 8):
            until(lambda: not is_running(stuck), "its end")
        is_replaced(process, stuck)
        with crowd(process) as more:
            all_have_begun(more)


@pytest.mark.slow
@pytest.mark.parametrize("number", few([signal.SIGTERM], all_of=[signal.SIGTERM, signal.SIGINT]))
def test_all_streams_finish_before_the_end(number: signal.Signals):
    with several("--drain-s", "60") as process:
        short = {**ENDLESS, "max_tokens": 100}
        with Crowd(process.url, [short] * STREAMS) as going:
            all_have_begun(going)
            pids = [*children(process.process.pid)]
            for pid in [*pids, process.process.pid]:  # as systemd does, and pkill
                os.kill(pid, number)
            assert process.ended(within_s=120) == 0
            all_are_over(going)
            assert all(b'"finish_reason":"length"' in text for text in going.texts)
        until(lambda: not any(map(is_running, pids)), "the end of all processes")


@pytest.mark.slow
def test_streams_that_do_not_finish_in_time_end_with_an_error():
    with several("--drain-s", "1") as process, crowd(process) as going:
        all_have_begun(going)
        process.process.terminate()
        assert process.ended(within_s=60) == 0
        all_are_over(going)
        assert all(b'"message":"the server is shutting down"' in text for text in going.texts)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["engine", "server"])
def test_nothing_outlives_the_engine_or_the_first_process(lost: str):
    with several("--engine-restarts", "0") as process, crowd(process) as going:
        all_have_begun(going)
        pids = commands(process.process.pid)
        [engine] = [pid for pid, words in pids.items() if "ess.engine" in words]
        os.kill(engine if lost == "engine" else process.process.pid, signal.SIGKILL)
        until(lambda: not any(map(is_running, pids)), "the end of all processes")
        if lost == "engine":
            assert process.ended(within_s=60) == 1
            all_are_over(going)
            assert all(b"SIGKILL" in text for text in going.texts)


def test_two_servers_do_not_share_a_port_unawares():
    with Process(*PACED, "--server-processes", "2") as process:
        port = process.url.rpartition(":")[2]
        for count in ("1", "2"):
            with pytest.raises(AssertionError, match="Address already in use"):
                Process(*PACED, "--port", port, "--server-processes", count)


def test_a_process_that_cannot_obey_ends():
    """It cannot open the socket of the next engine, say. Another takes its place."""

    class Link:
        place = FrontPlace(front=1, count=2)
        lost = ""

        def interrupt(self, sentence: str) -> None:
            pass

        def renew(self, endpoint: str) -> None:
            raise OSError("too many open files")

        def lose(self, sentence: str) -> None:
            self.lost = sentence

    async def act() -> tuple[str, bool]:
        link = Link()
        server = SimpleNamespace(should_exit=False, server_state=SimpleNamespace(tasks=set()))
        front = Front(SimpleNamespace(link=link), server, ManualClock(), folder="here")
        front._hearing = asyncio.ensure_future(asyncio.sleep(0))
        orders = asyncio.StreamReader()
        orders.feed_data(b"succeed 1 it is gone\n")
        await front._obey(orders)
        return link.lost, server.should_exit

    lost, ends = asyncio.run(act())
    assert lost == "this process of the server ends: OSError: too many open files"
    assert ends


@pytest.mark.parametrize("how", ["ready", "lost"])
def test_a_process_accepts_connections_once_its_engine_is_ready(how: str):
    """It may replace another while the engine has long been ready: until it hears so it would
    refuse what the first process, which accepts for it, serves."""
    engine = EngineState(ManualClock())
    served = []

    async def serve(sockets: list[object]) -> None:
        served.append(sockets)

    async def act() -> None:
        service = SimpleNamespace(link=SimpleNamespace(engine=engine))
        front = Front(service, SimpleNamespace(serve=serve), ManualClock(), folder="here")
        serving = asyncio.ensure_future(front._serve("its listener"))
        engine.end("restarting", "it is gone; another starts")
        await asyncio.wait([serving], timeout=0.0)
        assert not served
        if how == "ready":
            engine.hear(Ready(vocabulary=512, length_max=2048, load_s=1.0))
        else:
            engine.end("lost", "it was lost too often")
        await serving

    asyncio.run(act())
    assert served == ([["its listener"]] if how == "ready" else [])


def test_the_first_process_accepts_for_one_that_ends_in_a_drain(monkeypatch: pytest.MonkeyPatch):
    """What connects to it would wait for an answer until the end of all."""
    took = []

    class Ended:
        async def ended(self) -> End:
            fronts.drain()
            return End("its process was ended by SIGKILL", is_by_code=False)

        def tell(self, line: str) -> None:
            pass

    async def start(program: str, told: Start, *, descriptors: list[int]) -> Ended:
        took.clear()
        return Ended()

    async def take(listener: int) -> None:
        took.append(listener)

    async def act() -> None:
        fronts.start()
        await asyncio.gather(*fronts._keepers)

    monkeypatch.setattr(Child, "start", start)
    link = SimpleNamespace(front_lost=lambda front: None)
    first = Start(told=msgspec.Raw(b"{}"), folder="here", listener=7, front=1, count=2)
    fronts = Fronts("none", [first], link, SimpleNamespace(take=take))
    asyncio.run(asyncio.wait_for(act(), 30.0))
    assert took == [7]
