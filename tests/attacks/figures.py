"""Figures beside their bounds: a table for people, rows for programs."""

from __future__ import annotations

from collections.abc import Sequence

from ess.bench.harness.report import Row
from tests.attacks.catalogue import ATTACKS
from tests.attacks.measure import DRAIN_S, EXIT_S, Figures

GAP_S = 0.25
FLUSH_S = 3.0
COLUMNS = ("attack", "it got", "server MiB", "all MiB", "gap ms", "health ms", "exit s", "beside")


def cells(figures: Figures) -> list[str]:
    return [
        figures.name,
        figures.got,
        mib(figures.server_bytes),
        mib(figures.all_bytes),
        milliseconds(figures.gap_s),
        milliseconds(figures.health_s),
        exit_of(figures),
        beside(figures),
    ]


def beside(figures: Figures) -> str:
    counts = (
        (figures.left, "left"),
        (figures.tracebacks, "tracebacks"),
        (figures.unhealthy, "probes failed"),
    )
    return ", ".join(f"{count} {what}" for count, what in counts if count)


def mib(size: int | None) -> str:
    return "" if size is None else f"{size / (1 << 20):,.0f}"


def milliseconds(time_s: float | None) -> str:
    return "" if time_s is None else f"{1e3 * time_s:,.0f}"


def exit_of(figures: Figures) -> str:
    if figures.exit_s is not None:
        return f"{figures.exit_s:.1f} ({figures.code})"
    return "never" if is_stuck(figures) else ""


def is_stuck(figures: Figures) -> bool:
    """It ran, and did not end."""
    return figures.exit_s is None and figures.all_bytes is not None


def paired(before: Sequence[Figures], after: Sequence[Figures]) -> list[list[str]]:
    """Both in each cell where they differ, the earlier first."""
    earlier = {figures.name: cells(figures) for figures in before}
    rows = []
    for figures in after:
        now = cells(figures)
        then = earlier.get(figures.name, now)
        pairs = zip(then, now, strict=True)
        rows.append([a if a == b else f"{a or '-'} / {b or '-'}" for a, b in pairs])
    return rows


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that is also one on a screen."""
    columns = list(zip(COLUMNS, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    pads = [str.ljust if i in (0, 1, 7) else str.rjust for i in range(len(widths))]
    ruler = [
        "-" * width if pad is str.ljust else "-" * (width - 1) + ":"
        for width, pad in zip(widths, pads, strict=True)
    ]
    lines = [
        [pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)]
        for row in (COLUMNS, ruler, *rows)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def above(figures: Figures) -> list[str]:
    """What is above its goal."""
    return [row.name for row in rows_of(figures, "") if row.met is False]


def rows_of(figures: Figures, tree: str) -> list[Row]:
    attack = ATTACKS.get(figures.name)
    if attack is None:
        return []
    given = [
        ("server", figures.server_bytes, "B", attack.server_mib << 20),
        ("all", figures.all_bytes, "B", attack.all_mib << 20),
        ("gap", figures.gap_s, "s", GAP_S),
        ("exit", EXIT_S if is_stuck(figures) else figures.exit_s, "s", DRAIN_S + FLUSH_S),
        ("left", figures.left, "processes", 0),
    ]
    config = {"tree": tree, "got": figures.got}
    return [
        Row(
            name=f"{figures.name}: {what}",
            value=value,
            unit=unit,
            baseline="goal",
            baseline_value=goal,
            ratio=goal / value if value else None,
            target=1.0,
            met=value <= goal,
            config=config,
        )
        for what, value, unit, goal in given
        if value is not None
    ]
