"""`python -m tests.gpu`: the tests of a device, several files at once, and none spoils the others.

A file runs in a process of its own, and where that dies or hangs another goes on behind the test
that did it. More than one runs at a time, since most of the time goes into compiling kernels. With
`--limit-s` everything ends then, and what has not run is named. With `--behind FILE`, the print of
an earlier run, what passed there is not run again. A foreign machine's plugins are not loaded, and
what its drivers and libraries warn of fails nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.guarded import SLOW_S

HERE = Path(__file__).parent
ENDINGS = ("passed", "skipped", "failed")
PASSED = re.compile(r"^[\d:]+ passed +[\d.]+ s (\S.*)$", re.MULTILINE)
GRACE_S = 30


def files_of_a_device() -> list[Path]:
    """Those that may hold such tests: whole engines, then what takes long."""
    both = [*HERE.glob("test_*.py"), *HERE.parent.joinpath("kernels").glob("test_*.py")]
    texts = {path: path.read_text() for path in both}
    marked = [path for path, text in texts.items() if "SETS" in text or "mark.gpu" in text]
    places = {"test_engines": 0, "test_sanitised": 1, "test_attend": 1}
    return sorted(marked, key=lambda path: (places.get(path.stem, 2), path.stem))


def play(path: Path, home: Path, given: argparse.Namespace, ends_s: float) -> Path:
    told, log = home / f"{path.stem}.told", home / f"{path.stem}.log"
    told.write_text("".join(f"passed\t{name}\t\n" for name in given.passed))
    hung_s = max(SLOW_S, given.seconds_each) + GRACE_S
    plugin = [
        "-c",
        str(HERE.parents[1] / "pyproject.toml"),
        "-p",
        "tests.support.guarded",
        "--told",
        str(told),
    ]
    plugin += ["--seconds-each", str(given.seconds_each)]
    command = [sys.executable, "-m", "pytest", *plugin, "-m", "gpu", "-W", "default", str(path)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    before = None
    while (said := told.read_text()) != before and time.monotonic() < ends_s:
        before = said
        with log.open("wb") as out:
            child = subprocess.Popen(
                [*command, *given.rest], stdout=out, start_new_session=True, env=environment
            )
            status = wait_for(child, ends_s, told, hung_s)
        if told.read_text().endswith("end\t\t\n"):
            return told
        print(f"{path.name}: its process ended with {status}, another goes on", flush=True)
    print(log.read_text(errors="replace")[-4000:], flush=True)
    with told.open("a") as file:
        file.write(f"failed\t{path.name}\tnot all of it has run\n")
    return told


def wait_for(child: subprocess.Popen[bytes], ends_s: float, told: Path, hung_s: float) -> int:
    """Its status. With its children it does not outlive the limit, nor this process, nor a time in
    which it has told nothing."""
    try:
        while time.monotonic() < ends_s and time.time() - told.stat().st_mtime < hung_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(min(1.0, max(0.0, ends_s - time.monotonic())))
        return -signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def summary(told: Sequence[Path]) -> bool:
    """Prints how everything ended; False where something failed or was cut short."""
    ends: dict[str, tuple[str, str]] = {}
    for line in (line for path in told for line in path.read_text().splitlines()):
        what, name, why = line.split("\t")
        if what == "begun":
            what, why = "failed", "its process died in it, or it took too long"
        if what in ENDINGS:
            ends[name] = what, why
    reasons = Counter(why for what, why in ends.values() if what == "skipped")
    for why, count in reasons.most_common():
        print(f"skipped {count}: {why}")
    for name, (what, why) in sorted(ends.items()):
        if what == "failed":
            print(f"FAILED {name} {why}".rstrip())
    counts = Counter(what for what, _ in ends.values())
    print(", ".join(f"{counts[what]} {what}" for what in ENDINGS), flush=True)
    return not counts["failed"]


def passed_before(path: Path | None) -> list[str]:
    """What an earlier run printed as passed."""
    return PASSED.findall(path.read_text(errors="replace")) if path else []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--limit-s", type=float, default=1e9)
    parser.add_argument("--seconds-each", type=float, default=100)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--files", type=Path, nargs="*", help="instead of all of a device")
    parser.add_argument("--behind", type=Path, help="what an earlier run has printed")
    given, given.rest = parser.parse_known_args(arguments)
    given.passed = passed_before(given.behind)
    files, ends_s = given.files or files_of_a_device(), time.monotonic() + given.limit_s
    with (
        tempfile.TemporaryDirectory() as home,
        ThreadPoolExecutor(given.processes) as pool,
    ):
        told = list(pool.map(lambda path: play(path, Path(home), given, ends_s), files))
        return 0 if summary(told) else 1


if __name__ == "__main__":
    sys.exit(main())
