"""The form that all benchmark results share: rows with a ratio against a named baseline."""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from rich.text import Text

from ess import console
from ess.bench.harness.folders import write_whole
from ess.bench.harness.measure.machine import Build, Machine
from ess.bench.harness.output import table
from ess.errors import BadInput

SCHEMA: Final = "ess.bench/1"

Better = Literal["lower", "higher"]
Format = Literal["table", "md", "csv", "jsonl"]
STDOUT: Final = Path("-")


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured number beside its baseline.

    `ratio` is how many times better than the baseline it is, whichever direction is better, so
    above 1 is a win; `target` is the least ratio wanted and `met` says whether it was reached.
    `samples` are the repetitions behind `value`, in its unit.
    """

    name: str
    value: float
    unit: str
    baseline: str | None = None
    baseline_value: float | None = None
    ratio: float | None = None
    target: float | None = None
    met: bool | None = None
    config: dict[str, Any] = {}
    samples: list[float] = []

    def __post_init__(self) -> None:
        numbers = [self.value, self.baseline_value, self.ratio, self.target, *self.samples]
        if not all(number is None or math.isfinite(number) for number in numbers):
            raise BadInput(f"{self.name}: a value, ratio, target or sample is not finite")
        if (self.baseline is None) != (self.baseline_value is None):
            raise BadInput(f"{self.name}: a baseline needs a name and a value, or neither")
        if (self.target is None) != (self.met is None):
            raise BadInput(f"{self.name}: target {self.target} needs met, and met a target")


class Document(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = SCHEMA
    build: Build
    machine: Machine
    rows: list[Row]


def compare(
    *,
    name: str,
    unit: str,
    ours: Sequence[float],
    baseline: tuple[str, Sequence[float]],
    better: Better = "lower",
    target: float | None = None,
    config: Mapping[str, Any] | None = None,
) -> Row:
    """A row from samples: medians, their ratio, and whether it reaches the target.

    >>> compare(name="gather", unit="us", ours=[9, 10, 30], baseline=("memcpy", [19, 20, 21])).ratio
    2.0
    """
    rival_name, rival = baseline
    for side, samples in (("ours", ours), (rival_name, rival)):
        if not samples or not all(sample > 0 and math.isfinite(sample) for sample in samples):
            raise BadInput(f"{name}: samples of {side} must be finite and above 0, at least one")
    value, rival_value = statistics.median(ours), statistics.median(rival)
    ratio = rival_value / value if better == "lower" else value / rival_value
    return Row(
        name=name,
        value=float(value),
        unit=unit,
        baseline=rival_name,
        baseline_value=float(rival_value),
        ratio=ratio,
        target=target,
        met=None if target is None else ratio >= target,
        config=dict(config or {}),
        samples=[float(sample) for sample in ours],
    )


def write(document: Document, *, json: Path | None, out: Path | None) -> None:
    """The document for programs; files get the whole document or nothing."""
    encoded = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    for path in dict.fromkeys((json, out)):
        if path not in (None, STDOUT):
            write_whole(path, encoded)
            console.note(f"written: {path}")
    if json == STDOUT:
        print(encoded.decode(), end="")


class Shown:
    """Rows for people, on stdout as they come. A form whose head names what all rows have is
    printed at the end; without a form nothing is."""

    def __init__(self, form: Format | None, build: Build, machine: Machine) -> None:
        self._form, self._about = form, (machine.line(), build.line())
        self._rows: list[Row] = []
        self._is_begun = False

    def add(self, rows: Sequence[Row]) -> None:
        self._rows += rows
        if self._form in LINES and rows:
            self._begin()
            LINES[self._form](rows)
            sys.stdout.flush()

    def end(self) -> None:
        self._begin()
        if self._form == "csv":
            _print_csv(self._rows)

    def _begin(self) -> None:
        if not self._is_begun and self._form in HEADS:
            HEADS[self._form](self._about)
        self._is_begun = True


def flat(row: Row) -> dict[str, Any]:
    """The row as one level of plain values, for spreadsheets."""
    spread = statistics.stdev(row.samples) if len(row.samples) > 1 else None
    return {
        "name": row.name,
        "value": row.value,
        "mean": statistics.fmean(row.samples) if row.samples else row.value,
        "std": spread,
        "unit": row.unit,
        "baseline": row.baseline,
        "baseline_value": row.baseline_value,
        "ratio": row.ratio,
        **row.config,
    }


def _print_csv(rows: Sequence[Row]) -> None:
    flattened = [flat(row) for row in rows]
    columns = dict.fromkeys(key for row in flattened for key in row)
    writer = csv.DictWriter(sys.stdout, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flattened)


def _print_json_lines(rows: Sequence[Row]) -> None:
    for row in rows:
        print(msgspec.json.encode(row).decode())


def _print_markdown_head(about: Sequence[str]) -> None:
    print("  \n".join(about) + "\n")
    print(f"| {' | '.join(table.COLUMNS)} | config |\n|---|---:|---|---:|---:|---|")


def _print_markdown(rows: Sequence[Row]) -> None:
    for row in map(msgspec.structs.asdict, rows):
        print(f"| {' | '.join([*table.cells(row), table.config(row)])} |")


def _print_table_head(about: Sequence[str]) -> None:
    for line in (*about, "", *table.heading()):
        console.tables().print(Text(line), soft_wrap=True)


def _print_table(rows: Sequence[Row]) -> None:
    out = console.tables()
    for row in map(msgspec.structs.asdict, rows):
        for line in table.lines(row):
            out.print(Text(line, style=VERDICTS[row["met"]]), soft_wrap=True)
        for line in table.config_lines(row):
            out.print(Text(line, style="dim"), soft_wrap=True)


HEADS: Final[dict[Format | None, Callable[[Sequence[str]], None]]] = {
    "table": _print_table_head,
    "md": _print_markdown_head,
}
LINES: Final[dict[Format | None, Callable[[Sequence[Row]], None]]] = {
    "table": _print_table,
    "md": _print_markdown,
    "jsonl": _print_json_lines,
}
VERDICTS: Final = {None: "", True: "green", False: "red"}
