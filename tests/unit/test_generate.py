"""The example of an engine in a program: it streams text, and reads its cache a second time."""

from __future__ import annotations

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
    lines = [done.stdout.splitlines() for done in (first, second)]
    assert len(lines[0]) == 4
    assert lines[0][1].startswith("first run: 0 of ")
    assert lines[0][2] == lines[0][0], "the same text again"
    assert lines[0][3] == lines[1][1].replace("first", "second") == lines[1][3]
