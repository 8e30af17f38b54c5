"""The example of a group runs, and prints what the members have exchanged."""

from __future__ import annotations

from pathlib import Path

from tests.support.own_python import python

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_runs() -> None:
    done = python("docs/examples/ranks.py")
    assert done.returncode == 0, done.stderr
    gathered, beats = done.stdout.splitlines()
    row_of = {0: "[0.0, 0.0, 0.0, 0.0]", 1: "[1.0, 1.0, 1.0, 1.0]"}
    assert gathered == f"add: [{', '.join(row_of[r] for r in (0, 0, 1, 1))}]"
    assert beats == "{1: 1, 2: 1, 3: 1}"
