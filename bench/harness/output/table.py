"""Rows as lines of text for people, 120 columns wide, with the standard library alone.

`ess-bench` and the GPU suite, which runs without our packages, print the same lines.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final

WIDTH: Final = 120
GAP: Final = "  "
COLUMNS: Final = {"benchmark": 43, "value": 20, "baseline": 28, "ratio": 8, "target": 13}
LEFT: Final = ("benchmark", "baseline")
CONFIG_LINES_MAX: Final = 2
COUNTS: Final = ("chunks", "compute threads", "pairs", "requests", "rows", "tokens")


def heading() -> list[str]:
    return [*_wrapped(list(COLUMNS)), "-" * WIDTH]


def cells(row: Mapping[str, Any]) -> list[str]:
    """Name, value, baseline, ratio and target; a baseline has the unit of the value."""
    baseline = f"{row['baseline']}: {short(row['baseline_value'])}" if row["baseline"] else ""
    ratio = "" if row["ratio"] is None else f"x{short(row['ratio'], digits=3)}"
    verdict = "met" if row["met"] else "MISSED"
    target = "" if row["target"] is None else f"x{short(row['target'], digits=3)} {verdict}"
    return [row["name"], _amount(row["value"], row["unit"]), baseline, ratio, target]


def _amount(value: float, unit: str) -> str:
    """
    >>> _amount(1, "compute threads"), _amount(2, "compute threads"), _amount(1, "of rows asked")
    ('1 compute thread', '2 compute threads', '1 of rows asked')
    """
    return f"{short(value)} {unit[:-1] if value == 1 and unit in COUNTS else unit}"


def lines(row: Mapping[str, Any]) -> list[str]:
    """A row's cells as lines; long cells continue in further lines."""
    return _wrapped(cells(row))


def config_lines(row: Mapping[str, Any]) -> list[str]:
    """At most two lines of it; the JSON document has all."""
    indent = 2 * GAP
    return textwrap.wrap(
        config(row),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        max_lines=CONFIG_LINES_MAX,
        placeholder=" ...",
    )


def config(row: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in row["config"].items())


def short(number: float, *, digits: int = 4) -> str:
    """The number with as many digits as people can compare at a glance."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.{digits}g}"


def _wrapped(texts: Sequence[str]) -> list[str]:
    columns = [
        textwrap.wrap(text, width) for text, width in zip(texts, COLUMNS.values(), strict=True)
    ]
    shown = []
    for at in range(max(map(len, columns))):
        parts = [
            f"{column[at] if at < len(column) else '':{'<' if name in LEFT else '>'}{width}}"
            for (name, width), column in zip(COLUMNS.items(), columns, strict=True)
        ]
        shown.append(GAP.join(parts).rstrip())
    return shown
