"""The runner of the device tests, on tests that hang, die and cannot be read."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tests.gpu.__main__ as runner
from tests.gpu.test_sanitised import findings

ROOT = Path(__file__).resolve().parents[2]
HEAD = "import faulthandler, os, time, pytest\npytestmark = pytest.mark.gpu\n"
BAD = """
def test_first(): pass
def test_hangs(): time.sleep(60)
def test_between(): assert [1] == [2], "not so"
def test_dies(): os.abort()
def test_crashes(): faulthandler._sigsegv()
def test_is_killed(): os.kill(os.getpid(), 9)
def test_fills_the_device(): raise MemoryError("torch.OutOfMemoryError: CUDA out of memory")
def test_breaks_behind_its_end():
    from tests.support import guarded
    guarded.is_broken = lambda: True
def test_skips(): pytest.skip("for a reason")
def test_last(): pass
"""


def run(*arguments: object) -> tuple[int, str]:
    command = [sys.executable, "-m", "tests.gpu", *map(str, arguments), "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_one_test_takes_nothing_from_the_others(tmp_path: Path) -> None:
    bad, good, broken = (tmp_path / f"test_{name}.py" for name in ("bad", "good", "broken"))
    bad.write_text(HEAD + BAD)
    good.write_text(HEAD + "def test_alone(): pass\n")
    broken.write_text("import nothing_of_this_name\n")
    needy = tmp_path / "test_needy.py"
    needy.write_text('import pytest\npytest.importorskip("nothing_at_all", reason="it needs it")\n')
    status, printed = run(
        "--seconds-each", 6, "--processes", 2, "--files", bad, good, broken, needy
    )
    assert status == 1
    assert "3 passed, 2 skipped, 8 failed" in printed, printed
    assert "skipped 1: Skipped: for a reason" in printed
    assert "skipped 1: Skipped: it needs it" in printed
    assert printed.count("its process died in it, or it took too long") == 4
    for cause in ("exit 86", "SIGABRT", "SIGSEGV", "SIGKILL (of the system, perhaps: no memory)"):
        assert f"test_bad.py: its process ended by {cause}, another goes on" in printed, printed
    assert "Fatal Python error: Segmentation fault" in printed
    assert "in test_crashes" in printed, "no stack of the crash is shown"
    assert "there was no memory on the device: the rest has a process of its own" in printed
    assert "a kernel that it had queued failed behind it" in printed
    assert "::test_hangs has taken 6 s" in printed
    assert "in test_hangs" in printed, "no stack is shown"
    kept = tmp_path / "printed.txt"
    kept.write_text(printed)
    again = run("--seconds-each", 6, "--behind", kept, "--files", bad, "-k", "first or between")[1]
    assert " failed " in again
    assert " passed " not in again, "what has passed is run again"
    assert "3 passed, 0 skipped, 1 failed" in again, again
    assert "not so" in printed
    assert "No module named 'nothing_of_this_name'" in printed


@pytest.mark.slow
def test_the_whole_ends_in_time(tmp_path: Path) -> None:
    slow, good, late = (tmp_path / f"test_{name}.py" for name in ("slow", "good", "late"))
    slow.write_text(HEAD + "def test_hangs(): time.sleep(600)\n")
    for path in (good, late):
        path.write_text(HEAD + "def test_alone(): pass\n")
    status, printed = run("--limit-s", 12, "--processes", 1, "--files", good, slow, late)
    assert status == 1
    assert "1 passed, 0 skipped, 3 failed" in printed, printed
    for path in (slow, late):
        assert f"FAILED {path.name} not all of it has run" in printed


HOLDS_THE_LOCK = """
import ctypes
def waits_for_a_device(): print("begun", flush=True); ctypes.PyDLL(None).sleep(60)
waits_for_a_device()
"""


def test_what_hangs_with_the_lock_shows_where(tmp_path: Path) -> None:
    """No thread of Python runs there, so the stacks come from a handler of a signal."""
    told, out = tmp_path / "told", tmp_path / "out"
    command = [sys.executable, "-X", "faulthandler", "-c", HOLDS_THE_LOCK]
    with out.open("wb") as file:
        started = {"stdout": subprocess.PIPE, "stderr": file, "start_new_session": True}
        with subprocess.Popen(command, **started) as child:
            assert child.stdout.readline() == b"begun\n"
            told.touch()
            status = runner.wait_for(child, time.monotonic() + 600, told, hung_s=0.1)
    assert status == -signal.SIGABRT
    assert "in waits_for_a_device" in out.read_text()


def test_without_a_device_one_sentence_is_printed(monkeypatch, capsys) -> None:
    monkeypatch.setattr(runner.driver, "why_missing", lambda: "the CUDA driver sees no device")
    assert runner.main([]) == 0
    assert capsys.readouterr().out == "nothing is tested: the CUDA driver sees no device\n"


def test_a_file_whose_package_is_missing_is_named(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "test_some.py"
    path.write_text("import torch\n")
    assert runner.lacks(path) is None
    monkeypatch.setattr(runner.importlib.util, "find_spec", lambda name: None)
    assert runner.lacks(path) == "torch"
    path.write_text("def test_first(): import torch\n")
    assert runner.lacks(path) is None
    (tmp_path / "conftest.py").write_text("from triton import language\n")
    assert runner.lacks(path) == "triton"


PRINTED = """moves ...
========= COMPUTE-SANITIZER
rings ...
========= Barrier error detected. Divergent thread(s) in warp
=========     at ess_ring_rows+0x1f0
Traceback (most recent call last):
"""


def test_what_a_sanitizer_says_first_is_printed_first() -> None:
    """However much comes behind it."""
    shown = findings(PRINTED + "a frame of Python\n" * 500 + "LAUNCH_FAILED (719)\n").splitlines()
    assert shown[:2] == ["moves ...", "========= COMPUTE-SANITIZER"]
    assert "Divergent thread(s) in warp" in shown[3]
    assert shown[-1] == "LAUNCH_FAILED (719)"
    assert len(shown) < 40
