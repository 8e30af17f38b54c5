"""Rows that hold a prediction against a published number: the ratio says how close they are."""

from __future__ import annotations

from typing import Any, Final

from ess.bench.harness.report import Row

ROUNDING: Final = 1e-9


def agreement(
    *,
    name: str,
    unit: str,
    ours: float,
    published: tuple[str, float],
    tolerance: float | None = None,
    config: dict[str, Any] | None = None,
) -> Row:
    """The ratio is the smaller over the larger; within `tolerance` of the published is met.

    >>> agreement(name="misses", unit="rows", ours=95, published=("paper", 100), tolerance=0.1).met
    True
    """
    source, value = published
    error = ours / value - 1
    return Row(
        name=name,
        value=float(ours),
        unit=unit,
        baseline=source,
        baseline_value=float(value),
        ratio=min(ours, value) / max(ours, value),
        target=None if tolerance is None else 1 - tolerance,
        met=None if tolerance is None else abs(error) <= tolerance + ROUNDING,
        config={"error": f"{error:+.1%}", **(config or {})},
    )
