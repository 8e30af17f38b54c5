"""The example of an engine in a program: it streams text, and reads its cache a second time."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.support.forked import run

GENERATE = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"


def test_a_second_run_reads_the_prompts_from_the_disk(tmp_path: Path) -> None:
    words = (GENERATE, "docs/examples/generate.py", tmp_path / "cache")
    first, second = (run("engine", "-c", *words, env=os.environ) for _ in range(2))
    parts = [re.split(r"\n(\w+) run: (\d+) of 682 .*\n", printed) for printed in (first, second)]
    text, turn, count, again, later, cached, rest = parts[0]
    assert (turn, later, count, rest) == ("first", "second", "0", "")
    assert again == text
    assert int(cached) > 341, "rows of both prompts"
    assert parts[1] == [text, "first", cached, text, "second", cached, ""]
