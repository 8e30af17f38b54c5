"""Signals that come before a server runs: while it imports, or between greeting and loop."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ess import scripts
from tests.support.forked import ROOT, finished
from tests.support.process import RUN, SMALL

AT = {
    "its greeting": ("ess.server.commands.start.banner", "greet"),
    "its folder": ("ess.server.commands.start.launch", "engine_link"),
    "its service": ("ess.server.commands.start.launch", "make_service"),
}
SIGNALLED = """
import importlib, os, signal, sys
home, name, *numbers = {told}
module = importlib.import_module(home)
act = getattr(module, name)
def signalled(*given, **named):
    try:
        return act(*given, **named)
    finally:
        for number in numbers:
            os.kill(os.getpid(), number)
setattr(module, name, signalled)
"""


@pytest.mark.slow
@pytest.mark.parametrize("at", AT)
@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGTERM,), (signal.SIGINT,), (signal.SIGHUP, signal.SIGTERM), (signal.SIGTERM,) * 2],
    ids=lambda numbers: "+".join(number.name for number in numbers),
)
def test_the_server_ends_as_always_and_leaves_nothing(at: str, numbers, tmp_path: Path):
    told = (*AT[at], *map(int, numbers))
    words = [word for pair in SMALL.items() for word in pair]
    socket = tmp_path / "socket"
    flags = ("--engine", "paced", "--uds", str(socket))
    given = ["serve", "--json", *words, *flags]
    ended = finished(
        "server",
        *("-c", SIGNALLED.format(told=told) + RUN, *given),
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stderr
    assert not [*tmp_path.glob("ess-*")], "its folder"
    assert not socket.exists()
    assert "ess: ended after" in ended.stderr


@pytest.mark.parametrize("command", ["serve", "prefill", "decode", "chat"])
def test_a_server_that_imports_outlives_a_hangup(command: str, monkeypatch: pytest.MonkeyPatch):
    def imported(name: str) -> SimpleNamespace:
        before = signal.getsignal(signal.SIGHUP)
        assert (before is signal.SIG_DFL) == (command == "chat")
        if command != "chat":
            os.kill(os.getpid(), signal.SIGHUP)
        return SimpleNamespace(main=lambda: 7)

    handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    monkeypatch.setattr(sys, "argv", ["ess", command])
    monkeypatch.setattr(importlib, "import_module", imported)
    monkeypatch.setattr(os, "isatty", lambda descriptor: False)
    try:
        assert scripts.ess() == 7
    finally:
        signal.signal(signal.SIGHUP, handler)
