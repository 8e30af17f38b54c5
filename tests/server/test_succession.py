"""The server outlives its engine: real processes, real signals, and what clients see of it."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import operator
import os
import re
import resource
import signal
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ess.pool.disk.folder import SLAB
from ess.server.process.child import Child, End
from ess.server.process.engines import restarts
from ess.server.process.engines.group import EngineGroup, Loss
from ess.server.process.engines.restarts import OVER_S, Restarts
from ess.server.process.engines.succession import EngineStart, Succession
from ess.server.process.fronts import Fronts, Start, endpoint_of
from ess.server.process.whole_run import run_whole
from tests.server.harness import until
from tests.server.test_dashboard import metrics
from tests.server.test_fronts import (
    all_are_over,
    all_are_ready,
    all_have_begun,
    crowd,
    is_replaced,
    several,
)
from tests.support.kin import children, commands, is_running, worker_of
from tests.support.manual_clock import ManualClock
from tests.support.process import Process

PACED = ("--engine", "paced", "--pace-ms", "20")
KILLED = "the engine is gone: its process was ended by SIGKILL"


def has_engine(process: Process, *others: int) -> bool:
    engines = [
        pid for pid, words in commands(process.process.pid).items() if "ess.engine.process" in words
    ]
    return bool(set(engines) - {*others})


def succeeded(process: Process, lost: int) -> None:
    until(lambda: not is_running(lost), "the lost engine's end")
    until(lambda: has_engine(process, lost), "another engine")
    process.wait_ready()


def stop_successor(process: Process) -> int:
    """The pid of an engine that was stopped before it got ready: of the next, unless that came
    too early for us."""
    while True:
        lost = process.kill_engine()
        until(lambda pid=lost: has_engine(process, pid), "another engine")
        stopped = process.engine_pid
        os.kill(stopped, signal.SIGSTOP)
        if all(process.status("/ready") != 200 for _ in range(3)):
            return stopped


def answered(process: Process, path: str, body: bytes | None = None) -> tuple[int, dict, dict]:
    """Status, headers, document."""
    made = http.client.HTTPConnection("127.0.0.1", process.port, timeout=60)
    try:
        headers = {"content-type": "application/json"}
        made.request("GET" if body is None else "POST", path, body, headers)
        answer = made.getresponse()
        return answer.status, dict(answer.getheaders()), json.load(answer)
    finally:
        made.close()


def stopped_said(process: Process) -> str:
    """The server's log when it was asked to end."""
    process.process.terminate()
    assert process.process.wait(60) == 0
    return process.process.communicate()[1]


@pytest.mark.slow
def test_a_killed_engine_ends_its_streams_and_another_answers():
    with Process(*PACED).wait_ready() as process, crowd(process, 4) as going:
        all_have_begun(going)
        server = process.process.pid
        lost = process.kill_engine()
        all_are_over(going)
        assert all(f'"message":"{KILLED}"'.encode() in text for text in going.texts)
        succeeded(process, lost)
        assert process.status("/health") == 200
        assert len("".join(c.choices[0].text for c in process.stream(max_tokens=9))) > 0
        assert metrics(process.url)["ess_engine_restarts_total", ""] == 1
        assert process.process.pid == server
        said = stopped_said(process)
        assert f"ess: {KILLED}; another starts (1 of 3); 4 requests are open; unless" in said
        assert "ess: ready again after" in said


@pytest.mark.slow
def test_between_two_engines_everything_is_503_with_the_reason_and_a_time():
    """The next engine is stopped as soon as it is there, so that it does not get ready."""
    with Process(*PACED, has_real_children=True).wait_ready() as process:
        stop_successor(process)
        for path, body in (
            ("/health", None),
            ("/ready", None),
            ("/v1/completions", b'{"prompt": "x", "max_tokens": 3}'),
        ):
            status, headers, document = answered(process, path, body)
            assert status == 503
            assert document["error"]["message"].startswith(f"{KILLED}; another starts in ")
            assert headers["retry-after"] == "5"
        shown = metrics(process.url)
        assert shown["ess_up", ""] == 0
        os.kill(process.engine_pid, signal.SIGCONT)
        process.wait_ready()
        assert answered(process, "/v1/completions", b'{"prompt": "x", "max_tokens": 3}')[0] == 200
        assert f"ess: {KILLED}; another starts in " in stopped_said(process)


@pytest.mark.slow
def test_a_whole_answer_that_was_under_way_is_503_with_a_time():
    body = b'{"prompt": "x", "max_tokens": 1900}'
    with Process(*PACED).wait_ready() as process, ThreadPoolExecutor() as beside:
        whole = beside.submit(answered, process, "/v1/completions", body)
        until(lambda: metrics(process.url)["ess_requests_running", ""] == 1, "its running")
        process.kill_engine()
        status, headers, document = whole.result(60)
        assert (status, headers["retry-after"]) == (503, "5")
        assert document["error"]["message"].startswith(KILLED)


@pytest.mark.slow
def test_a_stopped_engine_is_replaced_whether_it_runs_or_loads():
    process = Process(*PACED, "--watchdog-s", "3", has_real_children=True)
    with process.wait_ready(), crowd(process, 2) as going:
        all_have_begun(going)
        first = process.engine_pid
        os.kill(first, signal.SIGSTOP)
        all_are_over(going)
        silent = rb"it has (sent nothing|been stopped) for [\d.]+ s"
        assert all(re.search(silent, text) for text in going.texts)
        until(lambda: has_engine(process, first) and not is_running(first), "another engine")
        second = process.engine_pid
        os.kill(second, signal.SIGSTOP)
        until(lambda: has_engine(process, second) and not is_running(second), "the third engine")
        process.wait_ready()
        said = stopped_said(process)
        assert "its process" not in said
        assert "ess: the engine is gone: it has been stopped for" in said


@pytest.mark.slow
def test_one_that_is_killed_while_the_first_model_loads_is_replaced():
    with Process() as process:
        until(lambda: has_engine(process), "an engine")
        assert process.status("/ready") == 503
        lost = process.kill_engine()
        succeeded(process, lost)
        before = "".join(c.choices[0].text for c in process.stream(max_tokens=24, temperature=0))
        lost = process.kill_engine()
        succeeded(process, lost)
        after = "".join(c.choices[0].text for c in process.stream(max_tokens=24, temperature=0))
        assert before == after
        assert len(after) > 20


@pytest.mark.slow
def test_one_that_is_lost_while_the_server_drains_has_no_successor():
    with Process(*PACED, "--drain-s", "60").wait_ready() as process, crowd(process, 2) as going:
        all_have_begun(going)
        process.process.terminate()
        until(lambda: process.status("/ready") == 503, "the drain")
        process.kill_engine()
        all_are_over(going)
        assert all(KILLED.encode() in text for text in going.texts)
        assert process.ended(60) == 0
        assert "another starts" not in process.process.communicate()[1]


@pytest.mark.slow
def test_sigterm_between_two_engines_ends_the_server():
    with Process(*PACED, has_real_children=True).wait_ready() as process:
        second = stop_successor(process)
        process.process.terminate()
        assert process.ended(60) == 0
        until(lambda: not is_running(second), "its end")


@pytest.mark.slow
def test_beyond_the_limit_the_server_ends_and_says_so():
    with Process(*PACED, "--engine-restarts", "2").wait_ready() as process:
        for _ in range(2):
            succeeded(process, process.kill_engine())
        process.kill_engine()
        assert process.ended(60) == 1
        last = process.process.communicate()[1].strip().splitlines()[-1]
        most = "it was started again 2 times within 10 minutes, which is the most"
        assert last.endswith(f" ess: {KILLED}; {most}")


@pytest.mark.slow
def test_nothing_is_left_of_engines_that_were_lost():
    with Process(*PACED, "--engine-restarts", "9").wait_ready() as process:
        pid = process.process.pid

        def held() -> tuple[int, int]:
            """Descriptors and children of the server."""
            return len(os.listdir(f"/proc/{pid}/fd")), len(children(pid))

        counts = []
        for _ in range(5):
            with crowd(process, 2) as going:
                all_have_begun(going)
                succeeded(process, process.kill_engine())
            until(
                lambda: metrics(process.url)["ess_connections", ""] <= 1, "their connections' end"
            )
            counts.append(held())
        # The connection that asked last for the metrics may take a moment to end.
        until(lambda: all(map(operator.le, held(), counts[0])), "no more than after the first")
        assert len(os.listdir(f"/proc/{pid}/task")) < 64


@pytest.mark.slow
def test_all_processes_of_a_server_hear_the_next_engine():
    with several() as process, crowd(process) as going:
        all_have_begun(going)
        process.kill_engine()
        all_are_over(going)
        assert all(KILLED.encode() in text for text in going.texts)
        all_are_ready(process)
        with crowd(process) as more:
            all_have_begun(more)
        victim = next(p for p, words in commands(process.process.pid).items() if "front" in words)
        os.kill(worker_of(victim), signal.SIGKILL)
        is_replaced(process, victim)
        with crowd(process) as more:
            all_have_begun(more)


@pytest.mark.slow
def test_an_engine_that_cannot_load_is_not_started_again():
    """What it said is the last word, and the code is 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with Process("--kv-events", address) as process:
            assert process.process.wait(60) == 1
            said = process.process.communicate()[1]
    assert said.strip().splitlines()[-1].endswith("; it is not started again")
    assert "another starts" not in said


def test_what_an_engine_refuses_while_it_loads_is_a_sentence(tmp_path: Path) -> None:
    """No traceback stands before it."""
    (tmp_path / SLAB).mkdir()
    with Process("--prefix-cache-dir", str(tmp_path)) as process:
        assert process.process.wait(60) == 1
        said = process.process.communicate()[1]
    assert "Traceback" not in said
    assert f"gone: {tmp_path} cannot keep pages: Is a directory; it is not" in said


def test_an_engine_that_cannot_be_started_whole_has_ended(monkeypatch):
    """Its ports and files are free for the next one."""
    seen: list[str] = []

    class Started:
        def __init__(self) -> None:
            self._killed = asyncio.Event()

        def kill(self) -> None:
            self._killed.set()

        async def ended(self) -> End:
            await self._killed.wait()
            seen.append("ended")
            return End("SIGKILL", is_by_code=False)

    async def start(*words: object, **named: object) -> Started:
        seen.append("started")
        if len(seen) == 3:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return Started()

    monkeypatch.setattr(Child, "start", start)
    launches: Any = [SimpleNamespace(rank=None)] * 4
    with pytest.raises(OSError, match=os.strerror(errno.EAGAIN)):
        asyncio.run(EngineGroup.start(launches, ["there"], is_paced=True))
    assert seen == ["started"] * 3 + ["ended"] * 2


class Unable:
    """Starts nothing. As a link it hears of each loss."""

    def __init__(self) -> None:
        self.tried: list[int] = []
        self.heard: list[str] = []
        self.place = SimpleNamespace(front=0)
        self.engine = SimpleNamespace(has_answered=True)
        self.open_count = self.open_elsewhere_count = 0

    async def start(self, number: int) -> EngineGroup:
        self.tried.append(number)
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def interrupt(self, sentence: str) -> None:
        self.heard.append(sentence)

    def renew(self, endpoint: str) -> None:
        self.heard.append(endpoint)


def test_an_engine_that_cannot_be_started_is_lost(monkeypatch: pytest.MonkeyPatch):
    """The system has no more processes for us, say: it is tried again after growing pauses, however
    useful the engine before was."""
    monkeypatch.setattr(restarts, "PAUSE_S", 0.001)
    unable, clock = Unable(), ManualClock()
    start = EngineStart(
        folder="here",
        start=unable.start,
        watchdog_s=1.0,
        stopped_s=1.0,
        restarts=Restarts(2, clock),
    )
    fronts = Fronts("none", [], unable, None)  # type: ignore[arg-type]
    engines = Succession(start, unable, fronts, clock)  # type: ignore[arg-type]
    said = asyncio.run(engines.run())
    why = f"the engine is gone: it cannot be started: {os.strerror(errno.EAGAIN)}"
    assert said.startswith(f"{why}; it was started again 2 times")
    assert unable.tried == [0, 1, 2]
    assert unable.heard == [
        f"{why}; another starts in 0.001 s",
        endpoint_of("here", 0, 1),
        f"{why}; another starts in 0.002 s",
        endpoint_of("here", 0, 2),
        said,
    ]


def test_a_front_that_cannot_be_started_is_tried_again(monkeypatch):
    tried = []

    class Startable:
        async def ended(self) -> End:
            await asyncio.sleep(3600)

        async def stop(self, *, within_s: float) -> None:
            pass

        def tell(self, line: str) -> None:
            pass

    async def start(program: str, told: Start, *, descriptors: list[int]) -> Startable:
        tried.append(told.life)
        if len(tried) < 3:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return Startable()

    async def full(listener: int) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def act() -> None:
        link = SimpleNamespace(front_lost=lambda front: None)
        first = Start(told=msgspec.Raw(b"{}"), folder="here", listener=0, front=1, count=2)
        fronts = Fronts("none", [first], link, SimpleNamespace(take=full))  # type: ignore[arg-type]
        fronts.start()
        while len(tried) < 3:
            await asyncio.sleep(0)
        await fronts.stop(within_s=1.0)

    monkeypatch.setattr("ess.server.process.fronts.AGAIN_S", 0.0)
    monkeypatch.setattr(Child, "start", start)
    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(asyncio.wait_for(act(), 30.0))
    assert tried == [0, 1, 2]
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.slow
def test_a_server_that_can_open_nothing_more_ends():
    with Process(*PACED, "--engine-restarts", "1").wait_ready() as process:
        resource.prlimit(process.process.pid, resource.RLIMIT_NOFILE, (8, 8))
        process.kill_engine()
        assert process.ended(60) == 1
        said = process.process.communicate()[1].strip().splitlines()
        full = f"the engine is gone: it cannot be started: {os.strerror(errno.EMFILE)}"
        assert f" ess: {full}; it was started again once" in said[-1]


def test_a_loop_ends_where_no_file_can_be_opened():
    """All that is still running in it is over before it closes."""
    ends: list[str] = []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def beside() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("a task")

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            ends.append("a generator")

    async def work() -> int:
        beside_it = asyncio.ensure_future(beside())
        await asyncio.to_thread(int)
        number = await anext(left := numbers())
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        assert not beside_it.done()
        assert left is not None
        return number

    try:
        assert run_whole(work()) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert ends == ["a task", "a generator"]


def test_restarts_are_counted_over_a_time():
    clock = ManualClock()
    restarts = Restarts(2, clock)
    killed, said = Loss("killed"), Loss("no memory", is_said=True)
    assert restarts.why_not(said, was_ready=False) == "; it is not started again"
    for _ in range(2):
        assert restarts.why_not(killed, was_ready=False) == ""
        assert restarts.add(was_of_use=True) == 0.0, "streams wait"
        clock.advance(OVER_S / 3)
    assert "2 times within 10 minutes" in restarts.why_not(killed, was_ready=True)
    clock.advance(OVER_S / 2)
    assert restarts.count == 1
    assert restarts.why_not(said, was_ready=True) == ""
    assert Restarts(0, clock).why_not(killed, was_ready=True) == "; it is not started again"
    others = Restarts(2, clock, waits_for_others=True)
    assert others.why_not(said, was_ready=False) == ""


def test_pauses_before_engines_grow_while_none_is_of_use():
    restarts = Restarts(1000, ManualClock())
    pauses = [restarts.add(was_of_use=False) for _ in range(7)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert [restarts.add(was_of_use=is_of_use) for is_of_use in (True, False)] == [0.0, 0.5]
