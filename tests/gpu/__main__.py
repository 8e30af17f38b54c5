"""`python -m tests.gpu`: the tests of a device, several files at once, and none spoils the others.

A file runs in a process of its own, and where that dies or hangs another goes on behind the test
that did it; what hangs prints its stacks as it ends. More than one runs at a time, since most of
the time goes into compiling kernels. With `--limit-s` everything ends then, and what has not run is
named. With `--behind FILE`, the print of an earlier run, what passed there is not run again. A
foreign machine's plugins are not loaded, and what its drivers and libraries warn of fails nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
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

from ess.kernels.cuda import driver
from tests.support.guarded import SLOW_S

HERE = Path(__file__).parent
ENDINGS = ("passed", "skipped", "failed")
PASSED = re.compile(r"^[\d:]+ passed +[\d.]+ s (\S.*)$", re.MULTILINE)
UNFINISHED = "not all of it has run"
GRACE_S = 30
STACKS_S = 5
PACKAGES = ("torch", "triton")


def files_of_a_device() -> list[Path]:
    """Those that may hold such tests: whole engines, then what takes long."""
    both = [*HERE.glob("test_*.py"), *HERE.parent.joinpath("kernels").glob("test_*.py")]
    texts = {path: path.read_text() for path in both}
    marked = [path for path, text in texts.items() if "SETS" in text or "mark.gpu" in text]
    places = {"test_engines": 0, "test_served": 0, "test_sanitised": 1, "test_attend": 1}
    return sorted(marked, key=lambda path: (places.get(path.stem, 2), path.stem))


def lacks(path: Path) -> str | None:
    """The package that a file of tests imports and this machine does not have."""
    sources = [path, path.with_name("conftest.py")]
    text = "\n".join(source.read_text() for source in sources if source.exists())
    imported = (name for name in PACKAGES if re.search(rf"^(import|from) {name}\b", text, re.M))
    return next((name for name in imported if importlib.util.find_spec(name) is None), None)


def play(path: Path, home: Path, given: argparse.Namespace, ends_s: float) -> Path:
    told, log = home / f"{path.stem}.told", home / f"{path.stem}.log"
    told.write_text("".join(f"passed\t{name}\t\n" for name in given.passed))
    log.touch()
    if missing := lacks(path):
        told.write_text(f"skipped\t{path.name}\t{missing} is not installed\n")
        return told
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
        print(f"{path.name}: its process ended by {cause_of(status)}, another goes on", flush=True)
    print(log.read_text(errors="replace")[-4000:], flush=True)
    with told.open("a") as file:
        file.write(f"failed\t{path.name}\t{UNFINISHED}\n")
    return told


def wait_for(child: subprocess.Popen[bytes], ends_s: float, told: Path, hung_s: float) -> int:
    """Its status. With its children it does not outlive the limit, nor this process, nor a time in
    which it has told nothing: then it is asked to print where it stands, whichever process has the
    interpreter's lock, and ends by that."""
    try:
        while time.monotonic() < ends_s and time.time() - told.stat().st_mtime < hung_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(min(1.0, max(0.0, ends_s - time.monotonic())))
        child.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(STACKS_S)
        return -signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STACKS_S)  # in the driver even a killed process may stay


def cause_of(status: int) -> str:
    """What ended a process, in words."""
    if status >= 0:
        return f"exit {status}"
    name = signal.Signals(-status).name
    return f"{name} (of the system, perhaps: no memory)" if name == "SIGKILL" else name


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
    missing = None if given.files else driver.why_missing()
    if missing is not None:
        print(f"nothing is tested: {missing}")
        return 0
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
