"""`python -m tests.support.pretended tests.device.measured FOLDER NAME...`: benchmarks in small, in
turn. Each leaves its document in the folder, and behind what it prints comes `END`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ess.bench.gpu import rows, suite
from ess.bench.gpu.rig import Row

END = "-- end of a benchmark --"
EXPECTED = "## What `make bench-gpu` is expected to print"


def expectations() -> dict[str, re.Pattern[str]]:
    """Names of rows for which docs/cuda.md says what a device should give, as they stand there."""
    text = (Path(__file__).resolve().parents[2] / "docs/cuda.md").read_text().partition(EXPECTED)[2]
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    names = [name for line in lines for name in re.findall("`([^`]+)`", line.split("|")[1])]
    return {name: pattern_of(name) for name in names}


def unexpected(printed: list[Row]) -> list[str]:
    """Names of rows that fit no line there."""
    known = expectations().values()
    names = [row["name"] for row in printed]
    return [name for name in names if not any(each.fullmatch(name) for each in known)]


def pattern_of(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\.\.\.", ".*").replace("N", r"\d+"))


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    rows.TURNS, rows.BLOCKS = 2, (1, 4)
    for name in names:
        if suite.main(["--smoke", "--only", name, "--out", f"{folder}/{name}.json"]):
            sys.exit(f"{name} has failed")
        print(END)
