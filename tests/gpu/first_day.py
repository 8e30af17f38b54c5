"""`python -m tests.gpu.first_day`: a machine with a GPU is there for minutes; what is worth most
comes first.

The native library, then side by side whatever is not timed: the tests of a device, what benchmarks
compile, the doctor. Then the benchmarks one by one, each alone on the device. A part that fails, or
takes too long, ends itself and nothing else. One report is written as each part ends, and every few
seconds, so that what ends this process too loses little:

    first-day.json   machine, parts with their ends and times, tests that failed, rows, the doctor
    first-day.txt    what all parts have printed, one behind the other

Both are kept in the folder `--kept`, and copied to `--out` each time. A second run with these
two files goes on, on this machine or another: it leaves out parts that have ended, and tests that
have passed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ess.bench.gpu.suite import BENCHMARKS, LIMIT_S
from ess.bench.harness.folders import write_whole
from ess.bench.harness.measure.machine import version_of
from tests.gpu.__main__ import UNFINISHED

ROOT = Path(__file__).resolve().parents[2]
REPORT, PRINTED, EARLIER = "first-day.json", "first-day.txt", "earlier.txt"
SECONDS = "SECONDS"
"""In a command: its limit, by which it ends itself."""
SHARED_S = 270.0
BUILD_S = 120.0
LEAST_S = 5.0
GRACE_S = 10.0
WRITTEN_S = 10.0
RUNNING = {"ended": False, "end": "running", "seconds": 0.0}
TAIL = 40
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


class Day:
    """`report` is what has been learned so far; only this owner writes it."""

    def __init__(self, kept: Path, out: Path | None, ends_s: float) -> None:
        self.kept, self.out, self.ends_s = kept, out, ends_s
        kept.mkdir(parents=True, exist_ok=True)
        self.report: dict[str, Any] = {"parts": {}, "failed": [], "rows": [], "doctor": None}
        with contextlib.suppress(FileNotFoundError):
            self.report |= json.loads((kept / REPORT).read_text())
            shutil.copyfile(kept / PRINTED, kept / EARLIER)
        self.report["machine"] = machine()

    @property
    def left_s(self) -> float:
        return self.ends_s - time.monotonic()

    def run(self, parts: Sequence[Part]) -> None:
        """Those that have not ended yet, side by side."""
        due = [part for part in parts if not self.has_ended(part)]
        self.report["parts"] |= {part.name: RUNNING for part in due}
        self.write()
        with ThreadPoolExecutor(max(1, len(due))) as pool:
            playing = {pool.submit(self.play, part): part for part in due}
            while playing:
                played, _ = wait(playing, timeout=WRITTEN_S, return_when=FIRST_COMPLETED)
                for one in played:
                    self.end(playing.pop(one), one.result())
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
            status = ended(words, printed, limit_s + GRACE_S * (SECONDS in part.command))
        return {
            "ended": status is not None,
            "end": "stopped" if status is None else f"exit {status}",
            "seconds": round(time.monotonic() - began_s, 1),
            "boot": boot(),
        }

    def learn(self, part: Part) -> None:
        """Into the report: how tests ended, what the doctor says, the rows of a benchmark."""
        text = self.said(part.name)
        if part.name == "tests" and text:
            lines = text.splitlines()
            failed = self.report["failed"] = [line for line in lines if line[:7] == "FAILED "]
            counted = [line for line in lines if " passed, " in line]
            self.report["counts"] = (counted or lines)[-1]
            if any(line.endswith(UNFINISHED) for line in failed):
                self.report["parts"]["tests"]["ended"] = False
        if part.name == "doctor":
            with contextlib.suppress(ValueError):
                found, _ = json.JSONDecoder().raw_decode(text, text.index("{\n"))
                self.report["doctor"] = found
        with contextlib.suppress(OSError, ValueError):
            rows = json.loads((self.kept / f"{part.name}.json").read_text())["rows"]
            others = [row for row in self.report["rows"] if row.get("part") != part.name]
            self.report["rows"] = others + [row | {"part": part.name} for row in rows]

    def text_of(self, name: str) -> Path:
        return self.kept / f"{name}.txt"

    def said(self, name: str) -> str:
        path = self.text_of(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def write(self) -> None:
        """Of an earlier run comes first what it has printed: its tests are not run again."""
        earlier = self.kept / EARLIER
        texts = [earlier.read_text(errors="replace")] if earlier.exists() else []
        texts += [f"==== {name}\n{self.said(name)}" for name in self.report["parts"]]
        write_whole(self.kept / REPORT, json.dumps(self.report, indent=1).encode() + b"\n")
        write_whole(self.kept / PRINTED, "\n".join(texts).encode())
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            for name in (REPORT, PRINTED):
                shutil.copyfile(self.kept / name, self.out / name)


def ended(words: Sequence[str], printed: Any, limit_s: float) -> int | None:
    """Its status, None where it had to be stopped, with all that it has started."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen(
        words,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=printed,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=environment,
    )
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


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
        "devices": said,
        "packages": {name: version_of(name) for name in PACKAGES},
        "without": wanted,
        "serves": importlib.util.find_spec("cyclopts") is not None,
    }


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
    for parts in phases(given.kept):
        day.run(parts)
    print("\n".join(summary(day.report)))
    ends = [told["end"] for told in day.report["parts"].values()]
    return 0 if all(end == "exit 0" for end in ends) else 1


if __name__ == "__main__":
    sys.exit(main())
