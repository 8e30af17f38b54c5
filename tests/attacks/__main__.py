"""All attacks on a server, and what each costs.

    python -m tests.attacks [NAME...] [--tree DIR] [--json FILE] [--keep FILE] [--before FILE]

Each attack meets a server of its own with an innocent stream of 10 tokens/s beside it. Memory is
above what the server held before: of the server's process, and the sum over it and all below it.
The gap is the longest time between two tokens of the stream, until two seconds after the attack;
an attack after which it is above 250 ms is run again up to twice, since the machine may have been
busy, and the least counts. `--tree` is another checkout; `--keep` writes the figures, and
`--before` shows those of an earlier run beside the new ones.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from ess.bench.harness.measure.machine import build, machine
from ess.bench.harness.report import Document, write
from tests.attacks.catalogue import ATTACKS, STARTS
from tests.attacks.figures import GAP_S, above, aligned, cells, paired, rows_of
from tests.attacks.measure import Figures, measure, measure_start
from tests.support.process import ROOT

RUNS_MAX = 3


def least(name: str, tree: Path) -> Figures:
    """Noise does not come every time, a fault does."""
    if name in STARTS:
        return measure_start(name, STARTS[name], tree)
    figures = measure(ATTACKS[name], tree)
    for _ in range(RUNS_MAX - 1):
        if not GAP_S < (figures.gap_s or 0.0) < 4 * GAP_S:
            break
        figures = min(figures, measure(ATTACKS[name], tree), key=lambda each: each.gap_s)
    return figures


def main() -> int:
    names = [*ATTACKS, *STARTS]
    parser = argparse.ArgumentParser(prog="tests.attacks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--tree", type=Path, default=ROOT)
    for flag in ("--json", "--keep", "--before"):
        parser.add_argument(flag, type=Path)
    given = parser.parse_args()
    if unknown := set(given.names) - set(names):
        parser.error(f"no attack is named {', '.join(sorted(unknown))}")
    here = machine()
    measured = []
    for name in given.names or names:
        measured.append(least(name, given.tree))
        print("  ".join(cells(measured[-1])), file=sys.stderr, flush=True)
        if given.keep:
            given.keep.write_bytes(msgspec.json.encode(measured))
    tell(given, here, measured)
    return 0


def tell(given: argparse.Namespace, here, measured: list[Figures]) -> None:
    if given.json:
        rows = [row for each in measured for row in rows_of(each, str(given.tree.name))]
        document = Document(build=build(), machine=here, rows=rows)
        write(document, json=given.json, out=None)
    before = []
    if given.before:
        before = msgspec.json.decode(given.before.read_bytes(), type=list[Figures])
    print(f"{here.line()}\n\n{aligned(paired(before, measured))}")
    for name in (name for each in measured for name in above(each)):
        print(f"above its goal: {name}")


if __name__ == "__main__":
    raise SystemExit(main())
