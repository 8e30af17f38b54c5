"""The one form that every benchmark speaks: rows with a ratio against a named baseline."""

from __future__ import annotations

import csv
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from ess import console
from ess.bench.harness.machine import Build, Machine, build, machine
from ess.errors import BadInput

SCHEMA: Final = "ess.bench/1"

Better = Literal["lower", "higher"]
Format = Literal["table", "md", "csv", "json", "jsonl"]


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured number beside its baseline.

    `ratio` is how many times better than the baseline, whichever direction is better, so above 1 is
    a win; `target` is the least ratio wanted and `met` says whether it was reached. `samples` are
    the repetitions behind `value`, in its unit.
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


def as_row(row: Row | Mapping[str, Any]) -> Row:
    """A row as it is, or from a mapping with the same keys; anything else is refused by name."""
    if isinstance(row, Row):
        return row
    try:
        return msgspec.convert(msgspec.to_builtins(dict(row), enc_hook=_plain), Row)
    except (msgspec.ValidationError, BadInput) as error:
        raise BadInput(f"benchmark row {row.get('name')!r}: {error}") from None


def _plain(number: Any) -> Any:
    if isinstance(number, np.generic):
        return number.item()
    raise BadInput(f"{type(number).__name__} {number!r} is not a plain value")


def run(rows: Callable[[], list[Row]], *, json: bool, out: Path | None) -> None:
    """A command around what it measures: a folder that is missing is said before it is waited for,
    and the machine is looked at before the measuring loads it."""
    console.check_folder("--out", out)
    measured_on = machine()
    document = Document(build=build(), machine=measured_on, rows=rows())
    present(document, json=json, out=out)


def present(
    document: Document, *, json: bool = False, form: Format = "table", out: Path | None
) -> None:
    """Tables for people, documents for programs; `out` gets the whole document or nothing of it."""
    if out is not None:
        draft = out.with_name(out.name + ".part")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
        os.replace(draft, out)
        console.note(f"written: {out}")
    match "json" if json else form:
        case "json":
            console.print_json(document)
        case "jsonl":
            for row in document.rows:
                print(msgspec.json.encode(row).decode())
        case "csv":
            _print_csv(document)
        case "md":
            _print_markdown(document)
        case "table":
            print_table(document)


def flat(row: Row) -> dict[str, Any]:
    """One level of plain values: what a spreadsheet and llama-bench's readers want."""
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


def _columns(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for line in lines for key in line))


def _print_csv(document: Document) -> None:
    lines = [flat(row) for row in document.rows]
    writer = csv.DictWriter(sys.stdout, _columns(lines), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)


def _print_markdown(document: Document) -> None:
    """One table per half, since their columns differ; what has no half is a sentence above."""
    print(f"{document.machine.line()}  \n{document.build.line()}\n")
    halves = dict.fromkeys(row.config.get("half", "") for row in document.rows)
    for half in halves:
        rows = [row for row in document.rows if row.config.get("half", "") == half]
        if not half:
            for row in rows:
                print(f"{row.name}: {row.config.get('how', '')}\n")
            continue
        lines = [_markdown_cells(row) for row in rows]
        columns = _columns(lines)
        print(f"**{half}**\n\n| {' | '.join(columns)} |")
        print("|" + "|".join("---" if name == "benchmark" else "---:" for name in columns) + "|")
        for line in lines:
            print(f"| {' | '.join(str(line.get(name, '')) for name in columns)} |")
        print()


def _markdown_cells(row: Row) -> dict[str, str]:
    line = flat(row)
    spread = "" if line["std"] is None else f" ± {_short(line['std'])}"
    config = {key: value for key, value in row.config.items() if key != "half"}
    against = {}
    if row.ratio is not None:
        against = {"baseline": f"{row.baseline}: {_short(row.baseline_value)}"}
        against["ratio"] = f"x{row.ratio:.2f}"
    return {"benchmark": row.name, row.unit: f"{_short(line['mean'])}{spread}", **against, **config}


def print_table(document: Document) -> None:
    """The same rows for people: aligned, the baseline beside, readable in a log file."""
    out = console.tables()
    out.print(Text(document.machine.line()))
    out.print(Text(document.build.line()))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("benchmark", "config"):
        table.add_column(heading)
    for heading in ("value", "baseline", "ratio", "target"):
        table.add_column(heading, justify="right", no_wrap=heading != "baseline")
    for row in document.rows:
        table.add_row(*_cells(row))
    out.print(table)


def _cells(row: Row) -> list[Text]:
    config = " ".join(f"{key}={value}" for key, value in row.config.items())
    baseline = f"{row.baseline} {_short(row.baseline_value)} {row.unit}" if row.baseline else ""
    ratio = "" if row.ratio is None else f"x{row.ratio:.2f}"
    target = "" if row.target is None else f"x{row.target:g} {'met' if row.met else 'MISSED'}"
    value = f"{_short(row.value)} {row.unit}"
    style = "" if row.met is None else "green" if row.met else "red"
    return [*map(Text, (row.name, config, value, baseline, ratio)), Text(target, style=style)]


def _short(number: float | None) -> str:
    """Four digits that people can compare at a glance."""
    if number is None:
        return ""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"
