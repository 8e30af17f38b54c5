"""The runner of the device tests, on tests that hang, die and cannot be read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAD = "import os, time, pytest\npytestmark = pytest.mark.gpu\n"
BAD = """
def test_first(): pass
def test_hangs(): time.sleep(60)
def test_between(): assert [1] == [2], "not so"
def test_dies(): os.abort()
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
    status, printed = run("--seconds-each", 6, "--processes", 2, "--files", bad, good, broken)
    assert status == 1
    assert "3 passed, 1 skipped, 4 failed" in printed, printed
    assert "skipped 1: Skipped: for a reason" in printed
    assert printed.count("its process died in it, or it took too long") == 2
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
    slow, good = tmp_path / "test_slow.py", tmp_path / "test_good.py"
    slow.write_text(HEAD + "def test_hangs(): time.sleep(600)\n")
    good.write_text(HEAD + "def test_alone(): pass\n")
    status, printed = run("--limit-s", 15, "--processes", 2, "--files", slow, good)
    assert status == 1
    assert "1 passed, 0 skipped, 2 failed" in printed, printed
    assert "FAILED test_slow.py not all of it has run" in printed
