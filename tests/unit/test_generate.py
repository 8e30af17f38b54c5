"""The example of an engine in a program: it streams text, and reads its cache a second time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.house.tree import ROOT


def test_a_second_run_reads_the_prompts_from_the_disk(tmp_path: Path) -> None:
    command = [sys.executable, "docs/examples/generate.py", str(tmp_path / "cache")]
    first, second = (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True)
        for _ in range(2)
    )
    parts = [re.split(r"\n(\w+) run: (\d+) of 682 .*\n", done.stdout) for done in (first, second)]
    text, turn, count, again, later, cached, rest = parts[0]
    assert (turn, later, count, rest) == ("first", "second", "0", "")
    assert again == text
    assert int(cached) > 341, "rows of both prompts"
    assert parts[1] == [text, "first", cached, text, "second", cached, ""]
