"""The example for readers does what it says."""

from __future__ import annotations

from tests.support.own_python import python


def test_the_example_hands_all_pages_over() -> None:
    done = python("docs/examples/handoff.py")
    assert done.returncode == 0, done.stderr
    assert "999 rows of 7 layers landed, all right" in done.stdout
    assert "'corrupt': " in done.stdout.splitlines()[1]
