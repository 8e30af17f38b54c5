"""`python -m tests.support.pretended tests.device.measured FOLDER NAME...`: benchmarks in small, in
turn. Each leaves its document in the folder, and behind what it prints comes `END`."""

from __future__ import annotations

import sys

from ess.bench.gpu import suite

END = "-- end of a benchmark --"

if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    for name in names:
        if suite.main(["--smoke", "--only", name, "--out", f"{folder}/{name}.json"]):
            sys.exit(f"{name} has failed")
        print(END)
