"""Processes that are kept: started again at the same address, given up, and never left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ess.clock import RealClock
from ess.server.commands.pd import keeper as keepers
from ess.server.commands.pd import orphans as orphans_of
from ess.server.commands.pd.keeper import STARTS_MAX, Keeper, Order
from ess.server.commands.pd.kept import Kept
from ess.server.commands.pd.orphans import Orphans, adopt_orphans
from ess.server.process.child import LINE_BYTES_MAX, lines_of
from ess.server.process.logs.log_records import record
from tests.server.harness import until
from tests.support.kin import is_running, told
from tests.support.process import ROOT

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
KEY = "a-key-that-no-log-may-show"


async def at_once(url: str) -> bool:
    return True


def made(program: str, *words: str, is_ready: Callable[[str], Awaitable[bool]] = at_once) -> Keeper:
    order = Order(name="worker-1", home=f"tests.pd.programs:{program}", words=words)
    clock = RealClock()
    return Keeper(
        order, environment=ENVIRONMENT, is_ready=is_ready, clock=clock, orphans=Orphans(clock)
    )


async def between_two_lives() -> tuple[Keeper, asyncio.Task[None]]:
    """A program that was killed and has not started again, and what keeps it."""
    kept = made("listens")
    keeping = kept.start()
    await kept.ready.wait()
    os.kill(kept.pid, signal.SIGKILL)
    while kept.ready.is_set():
        await asyncio.sleep(0.01)
    return kept, keeping


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work()

    asyncio.run(bounded())


def test_what_never_was_ready_is_started_once(capsys: pytest.CaptureFixture[str]):
    async def work() -> None:
        kept = made("fails")
        await kept.start()
        last = "".join(f"\n    line {number}" for number in range(4, 9))
        assert kept.why_lost == f"worker-1 is gone: its process ended with code 7{last}"
        assert not kept.ready.is_set()

    run(work)
    assert capsys.readouterr().err.count("worker-1: line 0\n") == 1


def test_a_program_that_cannot_be_started_is_given_up_with_the_reason(monkeypatch):
    async def start(*words: object, **named: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    async def work() -> None:
        kept = made("listens")
        await kept.start()
        why = f"worker-1 is gone: it cannot be started: {os.strerror(errno.EAGAIN)}"
        assert kept.why_lost == why

    monkeypatch.setattr(keepers.Child, "start", start)
    run(work)


def test_a_killed_program_is_back_at_its_port(capsys: pytest.CaptureFixture[str]):
    async def work() -> None:
        kept = made("listens")
        kept.start()
        for _ in range(2):
            await kept.ready.wait()
            url, pid = kept.url, kept.pid
            os.kill(pid, signal.SIGKILL)
            while kept.pid == pid or not kept.ready.is_set():
                await asyncio.sleep(0.01)
            assert kept.url == url
        await kept.end(within_s=30)
        assert not is_running(kept.pid)

    run(work)
    said = capsys.readouterr().err
    gone = "ess: worker-1 is gone: its process was ended by SIGKILL\n    it has begun\n"
    assert said.count(gone) == 2
    again = "ess: worker-1 starts again in"
    assert said.index(f"{again} 0.5 s") < said.index(f"{again} 1 s"), "pauses grow"


def test_what_a_killed_program_leaves_ends_before_it_starts_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """As an engine does whose memory takes seconds to go. Without the wait the next life would
    begin beside it: both write into one file."""
    monkeypatch.setattr(keepers, "AGAIN_S", 0.01)
    lives = tmp_path / "lives"

    async def work() -> None:
        kept = made("leaves_a_child", str(lives))
        kept.start()
        await kept.ready.wait()
        await written(lives, "left")
        os.kill(kept.pid, signal.SIGKILL)
        said = ""
        while "waits for the end of 1 process that killed ones left" not in said:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().err
            assert lives.read_text().count("begins") == 1
        (tmp_path / "end").touch()
        await written(lives, "begins\nleft\nends\nbegins\n")
        await kept.end(within_s=30)

    adopt_orphans()
    try:
        run(work)
    finally:
        (tmp_path / "end").touch()
        adopt_orphans(is_wanted=False)


def test_what_an_orphan_leaves_while_it_is_looked_at_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The orphan's child was not yet this process's own when the list of children was read. An
    operator reads what is left after the longest wait, and what ends it."""
    both = "import os, time; os.fork(); time.sleep(60)"
    look = orphans_of._has_ended
    ended: list[int] = []

    def ends(pid: int) -> bool:
        if not ended:
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            ended.append(pid)
        return look(pid)

    monkeypatch.setattr(orphans_of, "_has_ended", ends)
    adopt_orphans()
    try:
        orphans = Orphans(RealClock())
        parent = subprocess.Popen([sys.executable, "-c", both])
        until(lambda: Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text(), "a child")
        [left] = asyncio.run(orphans._left())
        parent.wait()
        monkeypatch.setattr(orphans_of, "GONE_S", 0.0)
        asyncio.run(orphans.gone("worker-1"))
        assert "worker-1 starts beside 1 process that killed" in (said := capsys.readouterr().err)
        assert f"`kill -9 {left}` ends them" in said
        os.kill(left, signal.SIGKILL)
        until(lambda: not asyncio.run(orphans._left()), "its end")
    finally:
        adopt_orphans(is_wanted=False)


async def written(file: Path, text: str) -> None:
    while not file.exists() or text not in file.read_text():
        await asyncio.sleep(0.01)


def test_the_last_start_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(keepers, "AGAIN_S", 0.01)

    async def work() -> None:
        kept = made("listens_once")
        keeping = kept.start()
        await kept.ready.wait()
        os.kill(kept.pid, signal.SIGKILL)
        await keeping
        assert kept.why_lost == "worker-1 is gone: its process ended with code 9\n    not again"

    run(work)
    assert capsys.readouterr().err.count("starts again") == STARTS_MAX


def test_what_retires_between_two_lives_does_not_start_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(keepers, "AGAIN_S", 0.2)

    async def work() -> None:
        kept, keeping = await between_two_lives()
        kept.retire()
        await keeping
        assert not kept.why_lost

    run(work)
    assert capsys.readouterr().err.count("worker-1 listens at") == 1


def test_a_hangup_reaches_servers_that_are_ready_and_no_router(monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    monkeypatch.setattr(Keeper, "refresh", lambda keeper: told.append(keeper.name))
    monkeypatch.setattr(os, "isatty", lambda number: False)
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)  # also under nohup

    async def never(url: str) -> bool:
        return False

    async def work() -> None:
        kept = Kept(["decode", "router"], environment=ENVIRONMENT, clock=RealClock())
        kept.heed_signals()
        made = [
            kept.keep(role, Order(name=name, home="tests.pd.programs:listens", words=()), is_ready)
            for role, name, is_ready in (
                ("decode", "decode-1", at_once),
                ("decode", "decode-2", never),
                ("router", "router", at_once),
            )
        ]
        for keeper in (made[0], made[2]):
            await keeper.ready.wait()
        os.kill(os.getpid(), signal.SIGHUP)
        while not told:
            await asyncio.sleep(0.01)
        assert told == ["decode-1"]
        for role in ("decode", "router"):
            await kept.end(role, within_s=5.0)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)

    run(work)


def test_a_terminal_that_is_closed_ends_all_in_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "isatty", lambda number: True)
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)

    async def work() -> None:
        kept = Kept(["rank"], environment=ENVIRONMENT, clock=RealClock())
        kept.heed_signals()
        os.kill(os.getpid(), signal.SIGHUP)
        assert not await kept.unless_stopped(asyncio.sleep(3600))
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)

    run(work)


def test_what_ends_once_all_were_told_to_end_does_not_start_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A signal to all processes may end a router while workers still drain. SIGTERM may come twice;
    Ctrl-C kills."""
    killed = []

    async def work() -> None:
        kept = Kept(["router"], environment=ENVIRONMENT, clock=RealClock())
        kept.heed_signals()
        order = Order(name="router", home="tests.pd.programs:listens", words=())
        keeper = kept.keep("router", order, at_once)
        await keeper.ready.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        assert not await kept.unless_stopped(asyncio.sleep(3600))
        os.kill(keeper.pid, signal.SIGKILL)
        await asyncio.wait(kept._tasks, timeout=60)
        monkeypatch.setattr(keeper, "kill", lambda: killed.append("router"))
        kept._on_signal(signal.SIGTERM)
        assert killed == []
        kept._on_signal(signal.SIGINT)
        await kept.end("router", within_s=5.0)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)

    run(work)
    assert killed == ["router"]
    said = capsys.readouterr().err
    assert "starts again" not in said
    assert "ess: router is gone: its process was ended by SIGKILL\n    it has begun\n" in said


def test_what_ends_as_asked_is_not_told(capsys: pytest.CaptureFixture[str]):
    async def work() -> None:
        kept = made("listens")
        kept.start()
        await kept.ready.wait()
        await kept.end(within_s=30)

    run(work)
    assert "is gone" not in capsys.readouterr().err


def test_a_process_that_does_not_end_is_killed(capsys: pytest.CaptureFixture[str]):
    async def work() -> None:
        kept = made("is_deaf")
        kept.start()
        await kept.ready.wait()
        await kept.end(within_s=0.2)
        assert not is_running(kept.pid)

    run(work)
    said = capsys.readouterr().err
    assert "ess: worker-1 has not ended within 0.2 s and is killed\n" in said
    assert "is gone" not in said


def test_what_has_ended_is_not_killed_while_its_last_words_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(keepers, "LAST_S", 60.0)

    async def work() -> None:
        kept = made("leaves_its_output", str(tmp_path / "end"))
        kept.start()
        await kept.ready.wait()
        child = kept._child
        os.kill(kept.pid, signal.SIGTERM)
        while not child.has_ended:
            await asyncio.sleep(0.01)
        await kept.end(within_s=0.05)
        (tmp_path / "end").touch()
        while not child._process._transport.is_closing():
            await asyncio.sleep(0.01)

    run(work)
    assert "is killed" not in capsys.readouterr().err


def test_an_end_in_a_pause_needs_no_wait():
    async def work() -> None:
        kept, keeping = await between_two_lives()
        await kept.end(within_s=600)
        assert keeping.done()

    run(work)


PARENT = """
import asyncio, os, sys
from ess.clock import RealClock
from ess.server.commands.pd.keeper import Keeper, Order
from ess.server.commands.pd.orphans import Orphans

async def at_once(url):
    return True

async def main():
    home, words = "tests.pd.programs:hangs", (sys.argv[1],)
    order = Order(name="worker-1", home=home, words=words, url="http://x:1")
    clock = RealClock()
    more = {"is_ready": at_once, "clock": clock, "orphans": Orphans(clock)}
    kept = Keeper(order, environment=dict(os.environ), **more)
    keeping = kept.start()
    await kept.ready.wait()
    print(kept.pid, flush=True)
    await keeping

asyncio.run(main())
"""


def test_who_lists_processes_sees_no_words_and_nothing_outlives_us():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, KEY], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            until(lambda: "leashed" in told(pid, "cmdline"), "its program's being loaded")
            assert KEY not in told(pid, "cmdline")
        finally:
            parent.kill()
    until(lambda: not is_running(pid), "its end")


def test_a_long_record_of_a_log_comes_whole():
    """A traceback has thousands of characters, and a piece of a record is none."""

    async def work() -> None:
        stream = asyncio.StreamReader(limit=1 << 20)
        long = record("error", "x" * 30_000).decode()
        stream.feed_data(long.encode() + b"\n")
        stream.feed_eof()
        assert [line async for line in lines_of(stream)] == [long]

    run(work)


def test_a_line_without_an_end_comes_in_pieces():
    """Or a program could fill our memory."""

    async def work() -> None:
        stream = asyncio.StreamReader(limit=1 << 20)
        stream.feed_data(b"short\n" + b"x" * (3 * LINE_BYTES_MAX) + b"\nlast")
        stream.feed_eof()
        lines = [line async for line in lines_of(stream)]
        assert (lines[0], lines[-1]) == ("short", "last")
        assert max(map(len, lines)) <= 2 * LINE_BYTES_MAX
        assert sum(map(len, lines)) == 3 * LINE_BYTES_MAX + len("shortlast")

    run(work)
