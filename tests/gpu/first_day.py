"""`python -m tests.gpu.first_day`: a machine with a GPU is there for minutes; what is worth most
comes first.

The native library, then side by side whatever is not timed: the tests of a device, what benchmarks
compile, the doctor. Then the benchmarks one by one, each alone on the device. A part that fails, or
takes too long, ends itself and nothing else. One report is written as each part ends, and every few
seconds, so that what ends this process too loses little:

    first-day.json   machine, parts with their ends and times, tests that failed, rows, the doctor
    first-day.txt    what all parts have printed, one behind the other

Both are kept in the folder `--kept`, and copied to `--out` each time. A second run with these
two files goes on, on this machine or another of its kind: it leaves out parts that have ended, and
tests that have passed. A part that found no device, or lacked a package, has not ended. A report of
another kind of device, or that cannot be read, is set aside under another name.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ess.bench.gpu.suite import BENCHMARKS, LIMIT_S
from ess.bench.harness.folders import write_whole
from ess.bench.harness.measure.machine import version_of
from ess.free_resources import memory_free
from tests.gpu.__main__ import ENDINGS, UNFINISHED, cause_of
from tests.gpu.marked import end_marked, status_of

ROOT = Path(__file__).resolve().parents[2]
REPORT, PRINTED, EARLIER = "first-day.json", "first-day.txt", "earlier.txt"
ASIDE = "before-"
SECONDS = "SECONDS"
"""In a command: its limit, by which it ends itself."""
SHARED_S = 270.0
BUILD_S = 120.0
LEAST_S = 5.0
GRACE_S = 10.0
WRITTEN_S = 10.0
RUNNING = {"ended": False, "end": "running", "seconds": 0.0}
TAIL = 40
CUT_OFF = 130
TOLD = re.compile(r"^[\d:]+ (passed|skipped|failed) +[\d.]+ s (\S.*)$", re.MULTILINE)
"""How tests.support.guarded prints the end of a test."""
SO_FAR = " so far"
"""Behind counts without which the runner of the tests has ended."""
NOTHING = re.compile(
    r"^(nothing is (?:tested|measured): .*|\w+: not (?:measured|compiled), .*)$", re.M
)
"""How a part says that it has found no device, or lacks a package."""
PACKAGES = ("torch", "triton", "numpy", "pytest", "setuptools", "cuda-bindings", "msgspec", "pyzmq")
COMMANDS = ("g++", "nvcc", "make", "git", "nvidia-smi", "compute-sanitizer")
ESS = "from ess.scripts import ess; raise SystemExit(ess())"


@dataclass(frozen=True)
class Part:
    """What one `stays` behind on the machine is made again on another machine."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    stays: bool = False


Playing = dict["Future[dict[str, Any]]", Part]


def phases(kept: Path) -> Iterator[list[Part]]:
    """What runs at the same time. Tests end before they would be ended, and name what is left."""
    python = sys.executable
    built = "-W", "ignore", "csrc/build.py", "-q", "build_ext", "--inplace"
    yield [Part("native", (python, *built), BUILD_S, stays=True)]
    tests = [python, "-m", "tests.gpu", "--limit-s", SECONDS]
    if (earlier := kept / EARLIER).exists():
        tests += ["--behind", str(earlier)]
    compiled = python, "-m", "ess.bench.gpu.suite", "--compile", SECONDS
    yield [
        Part("tests", tuple(tests), SHARED_S),
        Part("compile", compiled, SHARED_S, stays=True),
        Part("doctor", (python, "-c", ESS, "doctor", "--json"), SHARED_S),
    ]
    for name in BENCHMARKS:
        rows = "--out", str(kept / f"{name}.json")
        only = python, "-m", "ess.bench.gpu.suite", "--brief", "--only", name
        yield [Part(name, (*only, *rows), LIMIT_S[name])]


@contextlib.contextmanager
def without_signals() -> Iterator[None]:
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class Day:
    """`report` is what has been learned so far; only this owner writes it."""

    def __init__(self, kept: Path, out: Path | None, ends_s: float) -> None:
        self.kept, self.out, self.ends_s = kept, out, ends_s
        for folder in (kept, *([] if out is None else [out])):
            folder.mkdir(parents=True, exist_ok=True)
        self.report: dict[str, Any] = {"parts": {}, "failed": [], "rows": [], "doctor": None}
        self.begun: list[str] = []
        here = machine()
        if (kept / REPORT).exists():
            self.go_on(here)
        if kind_of(here) is not None or "machine" not in self.report:
            self.report["machine"] = here

    def go_on(self, here: dict[str, Any]) -> None:
        """What an earlier run has learned, unless it was on another kind of device. A run that sees
        no device, if only for now, sets nothing aside."""
        earlier = read(self.kept / REPORT)
        kind = kind_of(here)
        if earlier is not None and (kind is None or kind_of(earlier["machine"]) in (None, kind)):
            self.report |= earlier
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(self.kept / PRINTED, self.kept / EARLIER)
            return
        (self.kept / EARLIER).unlink(missing_ok=True)
        for name in (REPORT, PRINTED):
            with contextlib.suppress(FileNotFoundError):
                (self.kept / name).replace(self.kept / f"{ASIDE}{name}")
        print(
            f"an earlier report is of another device or damaged: {self.kept / ASIDE}*", flush=True
        )

    @property
    def left_s(self) -> float:
        return self.ends_s - time.monotonic()

    def run(self, parts: Sequence[Part]) -> None:
        """Those that have not ended yet, side by side."""
        due = [part for part in parts if not self.has_ended(part)]
        for part in due:
            self.report["parts"][part.name] = dict(RUNNING)
            self.begun.append(part.name)
            for left in (self.text_of(part.name), self.rows_of(part.name)):
                left.unlink(missing_ok=True)
        self.write()
        with ThreadPoolExecutor(max(1, len(due))) as pool:
            playing = {pool.submit(self.play, part): part for part in due}
            try:
                self.watch(playing)
            except BaseException:
                self.cut_off(playing)
                raise

    def watch(self, playing: Playing) -> None:
        while playing:
            played, _ = wait(playing, timeout=WRITTEN_S, return_when=FIRST_COMPLETED)
            for each in played:
                self.end(playing.pop(each), each.result())
            for part in playing.values():
                self.learn(part)
            self.write()

    def cut_off(self, playing: Playing) -> None:
        """A part may only now be starting its process: until all have ended. A second signal, as
        of a session that closes, would leave them running."""
        with without_signals():
            while wait(playing, timeout=0.1).not_done:
                end_marked(f"{os.getpid()}.")
        for each, part in playing.items():
            self.end(part, each.result() | {"ended": False, "end": "cut off"})
        self.write()

    def end(self, part: Part, told: dict[str, Any]) -> None:
        self.report["parts"][part.name] = told
        self.learn(part)
        print(f"{part.name}: {told['end']} after {told['seconds']:.0f} s", flush=True)

    def has_ended(self, part: Part) -> bool:
        told = self.report["parts"].get(part.name, {"ended": False})
        return told["ended"] and (not part.stays or told["boot"] == boot())

    def play(self, part: Part) -> dict[str, Any]:
        limit_s = min(part.limit_s, self.left_s)
        if limit_s < LEAST_S:
            return {"ended": False, "end": "not begun", "seconds": 0.0}
        words = [f"{limit_s:.0f}" if word == SECONDS else word for word in part.command]
        began_s = time.monotonic()
        with self.text_of(part.name).open("wb") as printed:
            grace_s = GRACE_S * (SECONDS in part.command)
            status = status_of(part.name, words, printed, limit_s + grace_s)
        nothing = NOTHING.search(self.said(part.name))
        how = "stopped" if status is None else cause_of(status)
        return {
            "ended": status is not None and nothing is None,
            "end": f"{how}, {nothing[0]}" if nothing else how,
            "seconds": round(time.monotonic() - began_s, 1),
            "boot": boot(),
        }

    def learn(self, part: Part) -> None:
        """Into the report: how tests ended, what the doctor says, the rows of a benchmark. Of a
        part that runs, what it has told so far."""
        text = self.said(part.name)
        if part.name == "tests" and text:
            failed, counts = of_tests(text)
            self.report |= {"failed": failed, "counts": counts}
            if counts.endswith(SO_FAR) or any(line.endswith(UNFINISHED) for line in failed):
                self.report["parts"]["tests"] |= {"ended": False}
        if part.name == "doctor":
            with contextlib.suppress(ValueError):
                report, _ = json.JSONDecoder().raw_decode(text, text.index("{\n"))
                self.report["doctor"] = report
        with contextlib.suppress(OSError, ValueError):
            rows = json.loads(self.rows_of(part.name).read_text())["rows"]
            others = [row for row in self.report["rows"] if row.get("part") != part.name]
            self.report["rows"] = others + [row | {"part": part.name} for row in rows]

    def text_of(self, name: str) -> Path:
        return self.kept / f"{name}.txt"

    def rows_of(self, name: str) -> Path:
        return self.kept / f"{name}.json"

    def said(self, name: str) -> str:
        path = self.text_of(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def write(self) -> None:
        """Of an earlier run comes first what it has printed: its tests are not run again."""
        earlier = self.kept / EARLIER
        texts = [earlier.read_text(errors="replace")] if earlier.exists() else []
        texts += [f"==== {name}\n{self.said(name)}" for name in self.begun]
        written = {
            REPORT: json.dumps(self.report, indent=1).encode() + b"\n",
            PRINTED: "\n".join(texts).encode(),
        }
        for name, content in written.items():
            write_whole(self.kept / name, content)
            if self.out is not None:
                write_whole(self.out / name, content)


def read(path: Path) -> dict[str, Any] | None:
    """A report; None where it is damaged."""
    try:
        report = json.loads(path.read_text())
        return report if {"parts", "rows", "machine"} <= report.keys() else None
    except (ValueError, AttributeError):
        return None


def of_tests(text: str) -> tuple[list[str], str]:
    """The tests that failed, and how many ended how: by the summary, or as they were told before
    one was printed."""
    lines = text.splitlines()
    if counted := [line for line in lines if " passed, " in line]:
        return [line for line in lines if line[:7] == "FAILED "], counted[-1]
    ends = {name: end for end, name in TOLD.findall(text)}
    counts = Counter(ends.values())
    failed = [f"FAILED {name}" for name, end in ends.items() if end == "failed"]
    return failed, ", ".join(f"{counts[end]} {end}" for end in ENDINGS) + SO_FAR


def boot() -> str:
    """Names the machine as long as it runs."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def machine() -> dict[str, Any]:
    wanted = [name for name in COMMANDS if shutil.which(name) is None]
    query = "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader"
    said = "no nvidia-smi"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=20)
        said = done.stdout.strip() or done.stderr.strip()
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "host_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "host_bytes_free": memory_free(),
        "locked_bytes_max": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "devices": said,
        "packages": {name: version_of(name) for name in PACKAGES},
        "without": wanted,
        "serves": importlib.util.find_spec("cyclopts") is not None,
    }


def kind_of(told: dict[str, Any]) -> str | None:
    """The name of the first device; None where none was seen."""
    name, *others = told["devices"].partition(",")
    return name if any(others) else None


def summary(report: dict[str, Any]) -> Iterator[str]:
    """The end of what is printed, which is what a caller may see of it."""
    yield f"machine: {report['machine']}"
    for name, told in report["parts"].items():
        yield f"{name}: {told['end']} after {told['seconds']:.0f} s"
    yield from report["failed"][-TAIL:]
    yield f"tests: {report.get('counts', 'none')}"
    missed = [row["name"] for row in report["rows"] if row.get("met") is False]
    yield f"rows: {len(report['rows'])}, of which {len(missed)} miss their target"
    doctor = report["doctor"] or {"checks": []}
    for check in doctor["checks"]:
        if check["grade"] != "ok" or check["name"].startswith("device"):
            yield f"doctor: {check['grade']}: {check['name']}: {check['found']} {check['hint']}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.first_day", description=__doc__)
    parser.add_argument("--limit-s", type=float, default=840.0)
    parser.add_argument("--kept", type=Path, default=ROOT / "build" / "first-day")
    parser.add_argument("--out", type=Path, help="a folder that is taken away as it is")
    given = parser.parse_args(arguments)
    day = Day(given.kept, given.out, time.monotonic() + given.limit_s)
    day.write()
    try:
        for parts in phases(given.kept):
            day.run(parts)
    except KeyboardInterrupt:
        print("cut off: the same call goes on", flush=True)
        return CUT_OFF
    finally:
        print("\n".join(summary(day.report)))
    ends = [told["end"] for told in day.report["parts"].values()]
    return 0 if all(end == "exit 0" for end in ends) else 1


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
