"""The example for readers does what it says."""

from __future__ import annotations

import subprocess
import sys

from tests.house.tree import ROOT


def test_the_example_hands_all_pages_over() -> None:
    done = subprocess.run(
        [sys.executable, "docs/examples/handoff.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "999 rows of 7 layers landed, all right" in done.stdout
    assert "'corrupt': " in done.stdout.splitlines()[1]
