"""Processes forked for tests are as started ones, and end with those who asked for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.server.harness import until
from tests.support.forked import ROOT, Forked, nursery, started
from tests.support.kin import is_running, kin

SAYS = """
import os, signal, sys, threading
print(__name__, sys.argv, os.getcwd(), os.environ["WISH"], len(os.listdir("/proc/self/fd")))
print(signal.getsignal(signal.SIGCHLD), signal.getsignal(signal.SIGINT), threading.active_count())
print(input(), file=sys.stderr)
sys.exit(3)
"""
WAITS = "print('here', flush=True); input()"
LEASHED = "from ess.engine.process.lifeline import die_with_parent as d; d(); print(1); input()"
ASKS = f"""
from tests.support.forked import started
child = started("server", ["-c", {LEASHED!r}], stdin=-1, stdout=-1, text=True)
child.stdout.readline()
print(child.pid, flush=True)
input()
"""


def said(process: subprocess.Popen[str]) -> tuple[str, str, int]:
    with process:
        return (*process.communicate("a word\n", timeout=120), process.returncode)


def test_it_is_as_a_started_one():
    words, env = ["-c", SAYS, "--flag", "value"], {**os.environ, "WISH": "héllo"}
    env["TORCHINDUCTOR_CACHE_DIR"] = "as torch sets it in a process that imports its compiler"
    pipes = {"stdin": -1, "stdout": -1, "stderr": -1, "text": True}
    forked = started("server", words, env=env, **pipes)
    assert isinstance(forked, Forked)
    real = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=env, **pipes)
    assert said(forked) == said(real)
    assert forked.returncode == 3


def test_it_is_waited_for_and_told_of_by_its_end():
    process = started("server", ["-c", WAITS], stdin=-1, stdout=-1, text=True)
    with process:
        assert process.stdout.readline() == "here\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == process.poll() == -signal.SIGTERM
        process.kill()
        assert not is_running(process.pid)


def test_a_module_is_executed_anew():
    with started("server", ["-m", "ess.server.commands.cli", "version"], stdout=-1) as process:
        assert b"ess" in process.stdout.read().lower()
        assert process.wait(120) == 0


def test_a_server_s_nursery_has_no_torch_and_no_thread():
    pid = nursery("server").process.pid
    process = started("server", ["-c", "import sys; sys.exit('torch' in sys.modules)"])
    assert process.wait(120) == 0
    assert len(os.listdir(f"/proc/{pid}/task")) == 1


@pytest.mark.parametrize("name", ["PYTHONPATH", "OMP_NUM_THREADS", "LD_PRELOAD"])
def test_what_is_read_at_a_start_needs_one(name: str):
    process = started("server", ["-c", "pass"], env={**os.environ, name: "/proc"}, stderr=-3)
    assert not isinstance(process, Forked)
    process.wait(120)


def test_nothing_outlives_who_asked():
    asks = [sys.executable, "-c", ASKS]
    with subprocess.Popen(asks, cwd=ROOT, stdin=-1, stdout=-1, text=True) as asking:
        child = int(asking.stdout.readline())
        everybody = [asking.pid, *kin(asking.pid)]
        assert child in everybody
        asking.kill()
    until(lambda: not any(map(is_running, everybody)), "the end of all")
