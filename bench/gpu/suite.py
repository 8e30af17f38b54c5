"""`python -m ess.bench.gpu.suite`: what the CUDA kernels do on this machine, from a bare checkout.

Prints a table and writes the document of ess.bench.harness.report, with the device in it. What each
row says of the questions that were open before the first device was seen:

- how many blocks fill the link, and which loads, stores and loops: `gather N rows, ...` by blocks,
  `flat` and `ring` beside `warp per row`, `in order` beside lists at random;
- is the limit one of requests: `gather rows of 128, 656, 4096 bytes` by blocks, up to 16;
- the link itself: `one large copy`, each way and both at once; `gather and scatter at once`;
- what a split costs: `layer: attend twice` and `attend twice and merge` beside `attend all`, by
  batch and queries;
- who disturbs whom: `layer: copy, then attend 0 ...` and the other order, with and without
  multiprocessors left alone; `layer: attend 0 beside the copy` in one graph;
- few misses: `attend in place` beside a fetch and attention over what it brought;
- which shapes of the Triton kernels: `... in use` beside the best that compiles well;
- products of experts: `experts: ...`, by how many weights' bytes and products a second;
- whole steps of an engine: `a step, RESIDENT`, and the rate of each way beside it;
- what is gained: `slice: offload` beside `slice: resident`, at equal bytes of the device;
- other libraries, where they are: `FlashMLA, ...`, also in place, `DeepGEMM, ...` by how many
  queries of a request go together. Lines on stderr say what their probes measured.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from ess.bench.gpu.rig import Row
from ess.bench.harness.folders import write_whole
from ess.bench.harness.measure import machine
from ess.bench.harness.output import table
from ess.kernels.cuda import driver, program
from ess.kernels.cuda.driver import Device

SCHEMA: Final = "ess.bench/1"
STDOUT: Final = Path("-")
BENCHMARKS: Final = {
    "resolve": "ess.bench.gpu.resolve:resolve_benchmark",
    "slice": "ess.bench.worker.one_gpu:slice_benchmark",
    "layer": "ess.bench.gpu.layer:layer_benchmark",
    "step": "ess.bench.engine.device_step:device_step_benchmark",
    "rows": "ess.bench.gpu.rows:rows_benchmark",
    "attend": "ess.bench.gpu.attend:attend_benchmark",
    "experts": "ess.bench.gpu.experts:experts_benchmark",
    "others": "ess.bench.gpu.attend:others_benchmark",
    "shapes": "ess.bench.gpu.shapes:shapes_benchmark",
}
"""In this order: what is worth most to know, and has not been measured, comes first."""
BRIEF: Final = {"rows": "ess.bench.gpu.rows:brief_rows_benchmark"}
"""Within a time limit, in the place of the benchmark: its pool is smaller."""
KERNELS: Final = {
    "resolve": "ess.bench.gpu.resolve:resolve_kernels",
    "slice": "ess.bench.worker.one_gpu:slice_kernels",
    "step": "ess.bench.engine.device_step:device_step_kernels",
    "layer": "ess.bench.gpu.layer:layer_kernels",
    "attend": "ess.bench.gpu.attend:attend_kernels",
    "experts": "ess.bench.gpu.experts:experts_kernels",
    "others": "ess.bench.gpu.attend:others_kernels",
    "shapes": "ess.bench.gpu.shapes:shapes_kernels",
}
"""What launches the kernels of each once; the rest launches none that these do not."""
COMPARING: Final = ("experts", "others")
COMPARED: Final = Path(__file__).resolve().parents[2] / "build" / "compared"
"""Other libraries that `make libraries` has fetched: these benchmarks alone import them."""
COMPILE_S: Final = 85.0
GONE_S: Final = 5.0
"""A process that waits in the driver may not end even when it is killed."""
LIMIT_S: Final = {
    "resolve": 35.0,
    "slice": 100.0,
    "layer": 75.0,
    "step": 40.0,
    "rows": 55.0,
    "attend": 25.0,
    "experts": 20.0,
    "others": 20.0,
    "shapes": 25.0,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ess.bench.gpu.suite", description=__doc__)
    parser.add_argument("--only", choices=list(BENCHMARKS), nargs="+")
    parser.add_argument("--smoke", action="store_true", help="small sizes: shows that it runs")
    parser.add_argument("--brief", action="store_true", help="a single one within its time limit")
    says = (
        "launch all kernels once, those of all benchmarks at once, for so long at most: what that"
    )
    says += " compiles is kept, and what is measured then launches it"
    kind: dict[str, Any] = {"type": float, "const": COMPILE_S, "metavar": "SECONDS"}
    parser.add_argument("--compile", nargs="?", **kind, help=says)
    parser.add_argument("--launch", choices=list(KERNELS), help="those of one, in this process")
    says = "the JSON document: into this file, or on stdout, and then the table on stderr"
    for name in ("--json", "--out"):
        parser.add_argument(name, nargs="?", const=STDOUT, type=Path, metavar="FILE", help=says)
    given = parser.parse_args(arguments)
    missing = driver.why_missing()
    if missing is not None:
        print(f"nothing is measured: {missing}", file=sys.stderr)
        return 0
    if given.launch is not None:
        launch_all(given.launch)
        return 0
    if given.compile is not None:
        names = given.only or list(KERNELS)
        return 0 if compile_kernels(names, limit_s=given.compile) else 1
    out = given.json or given.out
    if out != STDOUT:
        return 0 if measure(given.only, smoke=given.smoke, brief=given.brief, out=out) else 1
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "rows.json"
        with contextlib.redirect_stdout(sys.stderr):
            done = measure(given.only, smoke=given.smoke, brief=given.brief, out=kept)
        print(kept.read_text() if kept.exists() else "", end="")
    return 0 if done else 1


def measure(only: Sequence[str] | None, *, smoke: bool, brief: bool, out: Path | None) -> bool:
    """A single benchmark has no time limit of its own; a caller that has one says `brief`."""
    names = list(BENCHMARKS) if only is None else only
    if len(names) == 1:
        return measure_one(names[0], smoke=smoke, brief=brief, out=out)
    return measure_all(names, smoke=smoke, out=out)


def compile_kernels(names: Sequence[str], *, limit_s: float) -> bool:
    """Each in a process of its own, at the same time: a process compiles one kernel at a time."""
    known = [name for name in names if name in KERNELS]
    command = [sys.executable, "-m", "ess.bench.gpu.suite", "--launch"]
    with ThreadPoolExecutor(len(KERNELS)) as pool:
        ends = pool.map(lambda name: finishes([*command, name], limit_s=limit_s), known)
        return all([*ends])


def launch_all(name: str) -> None:
    try:
        launch = load(name, KERNELS)
    except ImportError as error:
        print(f"{name}: not compiled, {error}", file=sys.stderr)
        return
    launch()


def load(name: str, places: Mapping[str, str]) -> Callable[..., Any]:
    """Most need torch and Triton, which a bare machine may lack."""
    if name in COMPARING and COMPARED.is_dir():
        sys.path.append(str(COMPARED))
    home, _, called = places[name].partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(home), called)
    return function


def measure_one(name: str, *, smoke: bool, brief: bool, out: Path | None) -> bool:
    """Writes the results after every row, so that a later failure loses none."""
    try:
        benchmark = load(name, BENCHMARKS | BRIEF if brief else BENCHMARKS)
    except ImportError as error:
        print(f"{name}: not measured, {error}", file=sys.stderr)
        return True
    rows: list[Row] = []
    head = heading()
    print("\n".join(table.heading()))
    try:
        for row in benchmark(smoke=smoke):
            rows.append(row)
            print("\n".join([*table.lines(row), *table.config_lines(row)]), flush=True)
            if out is not None:
                write(head | {"rows": rows}, out)
    except Exception:
        traceback.print_exc(file=sys.stderr)
        return False
    return True


def measure_all(names: Sequence[str], *, smoke: bool, out: Path | None) -> bool:
    """Runs each benchmark in a process of its own: a fault or a hang of the device ends only that
    benchmark."""
    rows: list[Row] = []
    finished = []
    if not smoke:
        compile_kernels(names, limit_s=COMPILE_S)
    for name in names:
        part = None if out is None else out.with_suffix(f".{name}.json")
        if part is not None:
            part.unlink(missing_ok=True)  # of a call that was cut off
        kept = [] if part is None else ["--out", str(part)]
        command = [sys.executable, "-m", "ess.bench.gpu.suite", "--only", name, "--brief", *kept]
        finished.append(finishes(command + ["--smoke"] * smoke, limit_s=LIMIT_S[name]))
        if out is not None and part is not None and part.exists():
            written = json.loads(part.read_text())
            rows += written["rows"]
            write(written | {"rows": rows}, out)
            part.unlink()
    return all(finished)


def finishes(command: Sequence[str], *, limit_s: float) -> bool:
    child = subprocess.Popen(command, stdout=sys.stdout, start_new_session=True)
    try:
        return child.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        print(f"stopped after {limit_s:.0f} s: {' '.join(command)}", file=sys.stderr)
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GONE_S)


def heading() -> dict[str, Any]:
    device = Device()
    return {
        "schema": SCHEMA,
        "build": dataclasses.asdict(machine.build())
        | {
            "cuda_bindings": machine.version_of("cuda-bindings"),
            "compiler": program.why_missing() or program.compiler_version(),
        },
        "machine": dataclasses.asdict(machine.machine())
        | {
            "isa": device.arch,
            "device": device.name,
            "sm_count": device.sm_count,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        },
    }


def write(document: dict[str, Any], out: Path) -> None:
    write_whole(out, json.dumps(document, indent=2).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
