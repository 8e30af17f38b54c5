"""Fuzzes the server's doors, led by the lines that inputs reach.

python -m tests.fuzz [TARGET...] --minutes 10 --seed 1      (all of `tests.fuzz.targets` by default)
    --cases N         so many inputs of each target instead of minutes
    --corpus FOLDER   where inputs that reach new lines are kept, and findings/ beside them
    --avoid TEXT      passes over inputs with this text: a fault known already (repeatable)
    --json            progress as one JSON document a line
python -m tests.fuzz --replay FILE           runs one stored input again; 1 if it still breaks
python -m tests.fuzz [target...] --corpus FOLDER --promote
    rewrites the tree's corpus: the few inputs, cut small, that reach what all of them reach
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.fuzz.fuzzer import CORPUS, Finding, Fuzzer, Stored, Target, promoted, write
from tests.fuzz.targets import TARGETS

SLICE_S = 20.0


def main(arguments: list[str]) -> int:
    asked = _parser().parse_args(arguments)
    if asked.replay:
        return replay(asked.replay)
    names = asked.targets or list(TARGETS)
    folder = asked.corpus or Path(tempfile.mkdtemp(prefix="fuzz-"))
    if asked.promote:
        for name in names:
            promote(name, folder)
        return 0
    print(f"corpus and findings: {folder}", file=sys.stderr)
    each_s = asked.minutes * 60 / len(names)
    return max([fuzz(name, folder, asked, seconds=each_s) for name in names])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", usage=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--cases", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--avoid", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--promote", action="store_true")
    parser.add_argument("--replay", type=Path)
    return parser


def fuzz(name: str, folder: Path, asked: argparse.Namespace, *, seconds: float) -> int:
    with TARGETS[name]() as target:
        fuzzer = Fuzzer(
            target,
            seed=asked.seed,
            working=folder / name,
            findings=folder / "findings",
            avoid=asked.avoid,
        )
        began_s = time.monotonic()
        fuzzer.begin()
        if asked.cases:
            fuzzer.run_many(asked.cases)
            show(progress(fuzzer, time.monotonic() - began_s), is_json=asked.json)
            return 1 if fuzzer.found else 0
        while (left_s := began_s + seconds - time.monotonic()) > 0:
            fuzzer.spend(seconds=min(SLICE_S, left_s))
            show(progress(fuzzer, time.monotonic() - began_s), is_json=asked.json)
    return 1 if fuzzer.found else 0


def progress(fuzzer: Fuzzer, passed_s: float) -> dict[str, Any]:
    lines = fuzzer.target.lines
    return {
        "target": fuzzer.target.name,
        "seconds": round(passed_s, 1),
        "executions": fuzzer.run_count,
        "per_s": round(fuzzer.run_count / passed_s, 1),
        "lines": len(lines.seen),
        "lines_total": lines.total,
        "outcomes": len(getattr(fuzzer.target, "outcomes", ())),
        "corpus": len(fuzzer.values),
        "findings": {" at ".join(key): count for key, count in fuzzer.found.items()},
        "files": [str(path) for path in fuzzer.files],
    }


def show(report: dict[str, Any], *, is_json: bool) -> None:
    if is_json:
        print(json.dumps(report), flush=True)
        return
    print(
        f"{report['target']}: {report['seconds']:.0f} s, {report['executions']:,} executions,"
        f" {report['per_s']}/s, {report['lines']} of {report['lines_total']} lines,"
        f" {report['outcomes']} outcomes, {report['corpus']} inputs,"
        f" {len(report['findings'])} findings",
        flush=True,
    )
    for what, count in report["findings"].items():
        print(f"    {count} x {what}", flush=True)


def replay(path: Path) -> int:
    document = json.loads(path.read_text())
    with TARGETS[document["target"]]() as target:
        try:
            target.run(document["input"])
        except Finding as finding:
            print(finding)
            return 1
    print("nothing is wrong with it")
    return 0


def promote(name: str, folder: Path) -> None:
    """Files named seed-* were written by hand and stay as they are."""
    values = Stored(CORPUS / name).load().values + Stored(folder / name).load().values
    target: Target
    with TARGETS[name]() as target:
        kept = promoted(target, values)
    for path in (CORPUS / name).glob("[!s]*.json"):
        path.unlink()
    for value in kept:
        write(CORPUS / name, {"input": value})
    print(f"{name}: {len(kept)} of {len(values)} inputs")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
