"""Rows that compare a prediction with a published number: the ratio says how close it is."""

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
    """The ratio is 1 less the relative error, so it reaches its target within `tolerance`.

    >>> agreement(name="misses", unit="rows", ours=95, published=("paper", 100), tolerance=0.1).met
    True
    """
    source, value = published
    error = ours / value - 1
    ratio = max(0.0, 1 - abs(error))
    return Row(
        name=name,
        value=float(ours),
        unit=unit,
        baseline=source,
        baseline_value=float(value),
        ratio=ratio,
        target=None if tolerance is None else 1 - tolerance,
        met=None if tolerance is None else ratio >= 1 - tolerance - ROUNDING,
        config={"error": f"{error:+.1%}", **(config or {})},
    )
