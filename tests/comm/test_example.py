"""The example of a group runs, and prints what the members have exchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, "docs/examples/ranks.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    gathered, beats = done.stdout.splitlines()
    row_of = {0: "[0.0, 0.0, 0.0, 0.0]", 1: "[1.0, 1.0, 1.0, 1.0]"}
    assert gathered == f"add: [{', '.join(row_of[r] for r in (0, 0, 1, 1))}]"
    assert beats == "{1: 1, 2: 1, 3: 1}"
