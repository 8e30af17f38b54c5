"""`python -m ess.bench.gpu.suite`: what the CUDA kernels do on this machine, from a bare checkout.

Prints a table and writes the document of ess.bench.harness.report, with the device in it. What each
row says of the questions that were open before the first device was seen:

- how many blocks fill the link, and which loads, stores and loops: `gather N rows, ...` by blocks,
  `flat` and `ring` beside `warp per row`, `stores=`, `in order` beside lists at random;
- is the limit one of requests: `gather rows of 128, 656, 4096 bytes` by blocks, up to 16;
- the link itself: `one large copy`, each way and both at once; `gather and scatter at once`;
- what a split costs: `layer: attend twice` and `attend twice and merge` beside `attend all`, by
  batch and queries;
- who disturbs whom: `layer: copy, then attend 0 ...` and the other order, with and without
  multiprocessors left alone; `layer: attend 0 beside the copy` in one graph;
- few misses: `attend in place` beside a fetch and attention over what it brought;
- which shapes of the Triton kernels: `... in use` beside the best that compiles well;
- products of experts: `experts: ...`, by how many weights' bytes and products a second;
- other libraries, where they are: `FlashMLA, ...`, also in place, `DeepGEMM, ...` by how many
  queries of a request go together. Lines on stderr say what their probes found.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import ess
from ess.bench.gpu.resolve import resolve_benchmark
from ess.bench.gpu.rig import Row
from ess.bench.gpu.rows import rows_benchmark
from ess.kernels.cuda import driver, program
from ess.kernels.cuda.driver import Device

SCHEMA: Final = "ess.bench/1"
LIMIT_S: Final = {
    "rows": 110.0,
    "resolve": 70.0,
    "layer": 180.0,
    "attend": 50.0,
    "others": 50.0,
    "shapes": 90.0,
    "experts": 39.0,
}


def of_torch(name: str) -> Callable[..., Iterator[Row]]:
    """Left out, with the reason, on a machine without torch or Triton."""

    def benchmark(*, smoke: bool) -> Iterator[Row]:
        try:
            home = importlib.import_module("ess.bench.gpu.layer_suite")
        except ImportError as error:
            print(f"{name}: not measured, {error}", file=sys.stderr)
            return
        yield from getattr(home, f"{name}_benchmark")(smoke=smoke)

    return benchmark


BENCHMARKS: Final[dict[str, Callable[..., Iterator[Row]]]] = {
    "rows": rows_benchmark,
    "resolve": resolve_benchmark,
    "layer": of_torch("layer"),
    "attend": of_torch("attend"),
    "others": of_torch("others"),
    "shapes": of_torch("shapes"),
    "experts": of_torch("experts"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ess.bench.gpu.suite", description=__doc__)
    parser.add_argument("--only", choices=sorted(BENCHMARKS))
    parser.add_argument("--smoke", action="store_true", help="small sizes: shows that it runs")
    parser.add_argument("--out", type=Path, help="write the JSON document here")
    given = parser.parse_args(arguments)
    missing = driver.why_missing()
    if missing is not None:
        print(f"nothing is measured: {missing}", file=sys.stderr)
        return 0
    if given.only:
        return 0 if measure(given.only, smoke=given.smoke, out=given.out) else 1
    return 0 if measure_all(smoke=given.smoke, out=given.out) else 1


def measure(name: str, *, smoke: bool, out: Path | None) -> bool:
    """Written after every row: what is measured is kept, whatever comes then."""
    rows: list[Row] = []
    head = heading()
    try:
        for one in BENCHMARKS[name](smoke=smoke):
            rows.append(one)
            print(line(one), flush=True)
            if out is not None:
                write(head | {"rows": rows}, out)
    except Exception:
        traceback.print_exc(file=sys.stderr)
        return False
    return True


def measure_all(*, smoke: bool, out: Path | None) -> bool:
    """Each in a process of its own: a fault or a hang of the device ends one, and not the next."""
    rows: list[Row] = []
    finished = []
    for name in BENCHMARKS:
        part = None if out is None else out.with_suffix(f".{name}.json")
        kept = [] if part is None else ["--out", str(part)]
        command = [sys.executable, "-m", "ess.bench.gpu.suite", "--only", name, *kept]
        finished.append(finishes(command + ["--smoke"] * smoke, limit_s=LIMIT_S[name]))
        if out is not None and part is not None and part.exists():
            written = json.loads(part.read_text())
            rows += written["rows"]
            write(written | {"rows": rows}, out)
            part.unlink()
    return all(finished)


def finishes(command: Sequence[str], *, limit_s: float) -> bool:
    child = subprocess.Popen(command, start_new_session=True)
    try:
        return child.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        print(f"stopped after {limit_s:.0f} s: {' '.join(command)}", file=sys.stderr)
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def line(row: Row) -> str:
    config = " ".join(f"{key}={value}" for key, value in row["config"].items())
    value = f"{row['value']:9.2f} {row['unit']}"
    rival = f"x{row['ratio']:.2f} of {row['baseline']}" if row["baseline"] else ""
    verdict = {None: "", True: "met", False: "MISSED"}[row["met"]]
    return f"{row['name']:<42} {config:<34} {value:<15} {rival:<34} {verdict}".rstrip()


def heading() -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "build": {
            "version": ess.__version__,
            "commit": commit(),
            "python": platform.python_version(),
            "numpy": version_of("numpy"),
            "torch": version_of("torch"),
            "cuda_bindings": version_of("cuda-bindings"),
            "compiler": program.compiler_version(),
        },
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    device = Device()
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": device.arch,
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_average": os.getloadavg(),
        "device": device.name,
        "sm_count": device.sm_count,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    root = Path(ess.__file__).resolve().parent.parent
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def write(content: dict[str, Any], out: Path) -> None:
    """The whole file or none of it."""
    draft = out.with_name(out.name + ".part")
    draft.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(draft, out)


if __name__ == "__main__":
    sys.exit(main())
