"""`python -m ess.bench.gpu`: what the CUDA kernels do on this machine, from a bare checkout.

Prints a table and writes the document of ess.bench.report, with the device in it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import ess
from ess.bench.gpu_resolve import resolve_benchmark
from ess.bench.gpu_rig import Row
from ess.bench.gpu_rows import rows_benchmark
from ess.kernels.cuda import driver, program
from ess.kernels.cuda.driver import Device

SCHEMA: Final = "ess.bench/1"


def with_packages(name: str) -> Callable[..., Iterator[Row]]:
    """Left out, with the reason, on a machine without the packages of ESS."""

    def benchmark(*, smoke: bool) -> Iterator[Row]:
        try:
            home = importlib.import_module("ess.bench.gpu_layer")
        except ImportError as error:
            print(f"{name}: not measured, {error}", file=sys.stderr)
            return
        yield from getattr(home, f"{name}_benchmark")(smoke=smoke)

    return benchmark


BENCHMARKS: Final[dict[str, Callable[..., Iterator[Row]]]] = {
    "rows": rows_benchmark,
    "resolve": resolve_benchmark,
    "layer": with_packages("layer"),
    "shapes": with_packages("shapes"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ess.bench.gpu", description=__doc__)
    parser.add_argument("--only", choices=sorted(BENCHMARKS))
    parser.add_argument("--smoke", action="store_true", help="small sizes: shows that it runs")
    parser.add_argument("--out", type=Path, help="write the JSON document here")
    given = parser.parse_args(arguments)
    missing = driver.why_missing()
    if missing is not None:
        print(f"nothing is measured: {missing}", file=sys.stderr)
        return 1
    rows: list[Row] = []
    failed = [
        name
        for name in ([given.only] if given.only else BENCHMARKS)
        if not run(name, rows, smoke=given.smoke)
    ]
    if given.out is not None:
        write(document(rows), given.out)
    return 1 if failed else 0


def run(name: str, rows: list[Row], *, smoke: bool) -> bool:
    """Rows of those that ran are kept even when another failed."""
    try:
        for one in BENCHMARKS[name](smoke=smoke):
            rows.append(one)
            print(line(one), flush=True)
    except Exception:
        traceback.print_exc(file=sys.stderr)
        return False
    return True


def line(row: Row) -> str:
    config = " ".join(f"{key}={value}" for key, value in row["config"].items())
    value = f"{row['value']:9.2f} {row['unit']}"
    rival = f"x{row['ratio']:.2f} of {row['baseline']}" if row["baseline"] else ""
    verdict = {None: "", True: "met", False: "MISSED"}[row["met"]]
    return f"{row['name']:<42} {config:<34} {value:<15} {rival:<34} {verdict}".rstrip()


def document(rows: list[Row]) -> dict[str, Any]:
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
        "rows": rows,
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
    print(f"written: {out}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
