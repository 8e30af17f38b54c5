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

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Group:
    """Lost at once if `how` says how, else never."""

    def __init__(self, how: str = "") -> None:
        self.how = how
        self.stopped: list[float] = []

    async def lost(self, *, stopped_s: float) -> Loss:
        return Loss(self.how) if self.how else await asyncio.Future()

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


def run(made: list[Group | OSError], end: Callable[[], None]) -> list[int]:
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
        return await asyncio.wait_for(Node(start).run(), 30.0)

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
    assert capsys.readouterr().err.splitlines() == [
        "ess: a process cannot be started: Resource temporarily unavailable; the processes of this"
        " node start again",
        "ess: stage 1 is lost: gone; the processes of this node start again",
    ]


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
