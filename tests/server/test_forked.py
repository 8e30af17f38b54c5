"""Processes forked for tests are as started ones, and end with those who asked for them."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.harness import until
from tests.support.forked import ROOT, Forked, finished, forked_engines, nursery, started
from tests.support.kin import children, is_running, kin, told, worker_of

SAYS = """
import atexit, os, signal, sys, threading
atexit.register(print, "called at its end", end="")
print(__name__, sys.argv, os.getcwd(), os.environ["WISH"], len(os.listdir("/proc/self/fd")))
print(signal.getsignal(signal.SIGCHLD), signal.getsignal(signal.SIGINT), threading.active_count())
print(input(), file=sys.stderr)
threading.Timer(0.05, print, ["from a thread that is waited for"]).start()
"""
ENDS = {"sys.exit(3)": 3, "sys.exit('in words')": 1, "sys.exit()": 0, "pass": 0, "1 / 0": 1}
WAITS = "print('here', flush=True); input()"
LEASHED = "from ess.engine.process.lifeline import die_with_parent as d; d(); print(1); input()"
HANGS = "import os, signal; print(os.getpid(), os.fork(), flush=True); signal.pause()"
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


@pytest.mark.parametrize("end", ENDS)
def test_it_is_as_a_started_one(end: str):
    """Also in how it ends, except for the frames of a traceback."""
    words, env = ["-c", SAYS + end, "--flag", "value"], {**os.environ, "WISH": "héllo"}
    env["TORCHINDUCTOR_CACHE_DIR"] = "as torch sets it in a process that imports its compiler"
    pipes = {"stdin": -1, "stdout": -1, "stderr": -1, "text": True}
    forked = started("disk", words, env=env, **pipes)
    assert isinstance(forked, Forked)
    real = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=env, **pipes)
    (printed, errors, code), (theirs, their_errors, their_code) = said(forked), said(real)
    assert (printed, code) == (theirs, their_code)
    assert code == ENDS[end]
    ours, their = errors.splitlines(), their_errors.splitlines()
    assert (ours[0], ours[-1]) == (their[0], their[-1])


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


def test_what_hangs_ends_with_the_time_of_its_test(monkeypatch: pytest.MonkeyPatch):
    """And so does what it has forked."""
    begun = []

    def over(process: subprocess.Popen[str]) -> None:
        begun.extend(map(int, process.stdout.readline().split()))
        raise TimeoutError

    monkeypatch.setattr(subprocess.Popen, "communicate", over)
    with pytest.raises(TimeoutError):
        finished("server", "-c", HANGS, env=os.environ)
    until(lambda: not any(map(is_running, begun)), "their end")


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


def engine(**environment: str) -> subprocess.Popen[str]:
    """As a server starts one; it waits for what it shall serve."""
    command, pipes = (
        [sys.executable, "-m", "ess.engine.process.worker"],
        {"stdin": -1, "stderr": -1},
    )
    env = {**os.environ, **forked_engines(), **environment}
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes)


@pytest.fixture(scope="module")
def _imported():
    """Imports have processes of their own."""
    assert started("engine", ["-c", "pass"]).wait(120) == 0


def forks(kind: str = "engine") -> set[int]:
    return {*children(nursery(kind).process.pid)}


def fork_of(process: subprocess.Popen[str]) -> int:
    until(lambda: worker_of(process.pid) != process.pid, "a fork")
    return worker_of(process.pid)


def has_torch(process: int) -> bool:
    return "libtorch" in told(process, "maps")


@pytest.mark.usefixtures("_imported")
def test_a_process_stands_for_an_engine_and_ends_as_it_ends():
    before = forks()
    with engine() as process:
        until(lambda: forks() - before, "a fork")
        [fork] = forks() - before
        assert has_torch(fork)
        assert not has_torch(process.pid)
        process.stdin.write("{\n")
        process.stdin.flush()
        assert "Input data was truncated" in process.stderr.read()
        assert process.wait(120) == 1
    for number in (signal.SIGABRT, signal.SIGKILL):
        with engine() as process:
            os.kill(fork_of(process), number)
            assert process.wait(120) == -number


@pytest.mark.usefixtures("_imported")
def test_a_signal_for_a_fork_that_has_ended_changes_nothing():
    """It comes before the end is seen, since what stands for the fork is stopped."""
    with engine() as process:
        fork = fork_of(process)
        process.send_signal(signal.SIGSTOP)
        os.kill(fork, signal.SIGABRT)
        until(lambda: fork not in forks(), "the fork's end")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        assert process.wait(120) == -signal.SIGABRT


@pytest.mark.usefixtures("_imported")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_ends_it_ends_the_engine(number: signal.Signals):
    before = forks()
    with engine() as process:
        until(lambda: forks() - before, "a fork")
        process.send_signal(number)
        assert process.wait(120) == -number
    until(lambda: forks() == before, "the fork's end")


def test_a_fork_alone_has_the_files_that_what_stands_for_it_was_given():
    before, env = forks("server"), {**os.environ, **forked_engines()}
    command = [sys.executable, "-m", "ess.server.commands.start.front"]
    said, up = os.pipe()
    given = {"cwd": ROOT, "env": env, "stdin": -1, "stderr": -1, "pass_fds": [up]}
    with subprocess.Popen(command, **given) as process:
        os.close(up)
        until(lambda: forks("server") - before, "a fork")
        [fork] = forks("server") - before
        until(lambda: files(fork) == {0, 1, 2, up}, "its own files alone")
        until(lambda: up not in files(process.pid), "that it alone has the pipe")
        process.stdin.close()
        assert os.read(said, 1) == b""
    os.close(said)


def files(process: int) -> set[int]:
    return {*map(int, os.listdir(f"/proc/{process}/fd"))}


@pytest.mark.usefixtures("_imported")
def test_a_nursery_outlives_who_ends_before_its_answer(tmp_path: Path):
    """What stands for a fork is killed at any moment."""
    asked = {"words": ["-c", "pass"], "folder": str(ROOT), "environment": {**os.environ}}
    raw = json.dumps(asked | {"files": [0, 1, 2]})
    for _ in range(3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as standing:
            standing.connect(nursery("disk").address.replace("@", "\0"))
            with (tmp_path / "printed").open("w") as file:
                socket.send_fds(standing, [raw.encode()], [file.fileno()] * 3)
            assert select.select([standing], [], [], 60)[0]
    with started("disk", ["-c", "print(7)"], stdout=-1, text=True) as process:
        assert process.communicate(timeout=60)[0] == "7\n"


def test_an_engine_whose_environment_is_read_at_a_start_is_started():
    before = forks()
    with engine(OMP_NUM_THREADS="3") as process:
        until(lambda: has_torch(process.pid), "torch")
        assert forks() == before
        process.kill()


def test_a_worker_of_this_run_is_a_fork_of_one_that_has_collected(pytestconfig: pytest.Config):
    if not hasattr(pytestconfig, "workerinput"):
        pytest.skip("this run has no workers")
    assert "tests.support.collected" in Path("/proc/self/cmdline").read_text().split("\0")


def test_a_worker_of_this_run_and_what_it_forks_get_no_huge_pages(pytestconfig: pytest.Config):
    if not hasattr(pytestconfig, "workerinput"):
        pytest.skip("this run has no workers")
    if "THP_enabled" not in (status := Path("/proc/self/status").read_text()):
        pytest.skip("this kernel does not say who may have huge pages")
    says = "print(open('/proc/self/status').read())"
    forked = finished("server", "-c", says, env=os.environ).stdout
    assert all("THP_enabled:\t0\n" in each for each in (status, forked))


CONFTEST = """
from tests.support.collected import fork_workers

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        fork_workers(config.args)
"""
FAILS_FIRST = """
import sys
is_second, sys.is_second = hasattr(sys, "is_second"), True
assert is_second
"""
BROKEN = {
    "test_missing.py": "import of_nothing",
    "test_syntax.py": "def test(:",
    "test_first.py": FAILS_FIRST,
    "part/__init__.py": "import of_nothing",
}
SKIPPED = {"test_skipped.py": "import pytest\npytest.skip('all', allow_module_level=True)"}


@pytest.mark.parametrize(("files", "ended"), [(BROKEN, "4 errors"), (SKIPPED, "1 skipped")])
def test_a_worker_reports_files_whose_import_ends_early(
    files: dict[str, str], ended: str, tmp_path: Path
):
    """Their first import, and a second, in the process that workers are forked from."""
    ini = "[pytest]\naddopts = -p xdist -p no:cacheprovider --import-mode=importlib\n"
    own = {"pytest.ini": ini, "conftest.py": CONFTEST, "part/test_in.py": ""}
    (tmp_path / "part").mkdir()
    for name, text in (own | files).items():
        (tmp_path / name).write_text(f"{text}\n")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-n1", str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert f" {ended} in " in ran.stdout.replace("=", " "), ran.stdout + ran.stderr
