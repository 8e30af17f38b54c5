"""The processes of a machine that has no server: when they start again, and when they end."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from ess.server.commands.start import node
from ess.server.commands.start.node import STOP_S, Node
from ess.server.process.engines.group import EngineGroup, Loss

NOTED = (
    "ess: processes that requests may need go on until the first machine has ended, for 30 s at"
    " most; SIGINT ends them at once"
)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Group:
    """Lost at once if `how` says how, else when it is asked to leave. If it is `needed` it stays
    then, and calls that instead."""

    def __init__(self, how: str = "", *, needed: Callable[[], None] | None = None) -> None:
        self.how = how
        self.needed = needed
        self.asked = 0
        self.killed = False
        self.left = asyncio.Event()
        self.stopped: list[float] = []

    async def lost(self, *, stopped_s: float) -> Loss:
        if not self.how:
            await self.left.wait()
        return Loss(self.how)

    def ask_to_leave(self) -> None:
        self.asked += 1
        (self.needed or self.left.set)()

    def kill(self) -> None:
        self.killed = True

    async def stop(self, *, within_s: float) -> None:
        self.stopped.append(within_s)


@pytest.fixture(autouse=True)
def _signals_of_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The loop restores the default of a signal that it has handled."""
    monkeypatch.setattr(node, "AGAIN_S", 0.0)
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(
    made: list[Group | OSError], end: Callable[[], None], *, drain_s: float = 30.0
) -> list[int]:
    """Runs a node whose starts go like this, and calls `end` at the last; returns which it made."""
    numbers: list[int] = []

    async def start(number: int) -> EngineGroup:
        numbers.append(number)
        if number == len(made) - 1:
            end()
        if isinstance(made[number], OSError):
            raise made[number]
        return made[number]

    async def work() -> int:
        return await asyncio.wait_for(Node(start, drain_s=drain_s).run(), 60.0)

    assert asyncio.run(work()) == 0
    return numbers


def term() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_process_that_cannot_be_started_is_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(os, "isatty", lambda number: False)
    short = OSError(errno.EAGAIN, "Resource temporarily unavailable")
    lost, last = Group("stage 1 is lost: gone"), Group()
    assert run([short, lost, last], term) == [0, 1, 2]
    assert (lost.stopped, last.stopped) == ([0.0], [STOP_S])
    assert (lost.asked, last.asked) == (0, 0), "requests that resume need the last"
    assert capsys.readouterr().err.splitlines() == [
        "ess: a process cannot be started: Resource temporarily unavailable; the processes of this"
        " node start again",
        "ess: stage 1 is lost: gone; the processes of this node start again",
        NOTED,
    ]


def test_requests_of_the_first_machine_keep_a_node_that_is_told_to_end():
    """Its server is told too, often at once, and drains: without these processes it loses what is
    under way. SIGTERM may come twice."""

    def drained() -> None:
        assert not last.stopped
        term()
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, last.left.set)  # behind the signal

    last = Group(needed=drained)
    assert run([last], term) == [0]
    assert (last.asked, last.killed, last.stopped) == (1, False, [STOP_S])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_second_ctrl_c_ends_a_node_at_once(number: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "isatty", lambda number: True)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    last = Group(needed=lambda: os.kill(os.getpid(), number))
    assert run([last], term) == [0]
    assert (last.killed, last.stopped) == (True, [STOP_S])


def test_a_node_waits_no_longer_than_a_drain():
    last = Group(needed=lambda: None)
    assert run([last], term, drain_s=0.01) == [0]
    assert (last.killed, last.stopped) == (False, [STOP_S])


def test_a_terminal_that_is_closed_ends_a_node_in_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "isatty", lambda number: True)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    last = Group()
    assert run([last], lambda: os.kill(os.getpid(), signal.SIGHUP)) == [0]
    assert last.stopped == [STOP_S]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_hangup_that_asks_for_files_or_is_ignored_ends_no_node(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
):
    """Under nohup it is ignored on a terminal too."""
    monkeypatch.setattr(os, "isatty", lambda number: is_terminal)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if is_terminal else signal.SIG_DFL)
    lost, last = Group("gone"), Group()

    def end() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        term()

    assert run([lost, last], end) == [0, 1]
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
