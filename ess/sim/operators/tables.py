"""Measured operator tables: read, checked, interpolated.

Between two measured points a time is linear. Beyond the last it continues with the slope of the
last two; below the first it stays the same, since a kernel never gets cheaper than its launch.
"""

from __future__ import annotations

import csv
import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from ess.errors import BadInput

FOLDER: Final = Path(__file__).resolve().parent

Entry = tuple[float | str, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """Time over one size, sizes ascending."""

    sizes: tuple[float, ...]
    times: tuple[float, ...]

    def at(self, size: float) -> float:
        """
        >>> Curve((1.0, 3.0), (10.0, 20.0)).at(2), Curve((1.0, 3.0), (10.0, 20.0)).at(5)
        (15.0, 30.0)
        """
        if size <= self.sizes[0] or len(self.sizes) == 1:
            return self.times[0]
        right = min(bisect_right(self.sizes, size), len(self.sizes) - 1)
        low, high = self.sizes[right - 1], self.sizes[right]
        slope = (self.times[right] - self.times[right - 1]) / (high - low)
        return self.times[right - 1] + slope * (size - low)


@dataclass(frozen=True, slots=True)
class Surface:
    """Time over two sizes: one curve over the first size for each value of the second."""

    sizes: tuple[float, ...]
    curves: tuple[Curve, ...]

    def at(self, first: float, second: float) -> float:
        return Curve(self.sizes, tuple(curve.at(first) for curve in self.curves)).at(second)


class Exchange(NamedTuple):
    """Times of dispatch and combine over tokens of one GPU."""

    dispatch: Curve
    combine: Curve


Keyed = Mapping[Entry, Curve]
Surfaces = dict[Entry, Surface]


def entries_of(path: Path, columns: Sequence[str]) -> list[Entry]:
    with path.open(newline="") as lines:
        header, *rest = csv.reader(lines)
    if tuple(header) != tuple(columns):
        raise BadInput(f"{path.name}: columns {header}, expected {list(columns)}")
    return [tuple(map(_value, entry)) for entry in rest]


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def curves(entries: Sequence[Entry], *, keys: int) -> Keyed:
    """Curves over the second last column; the last column is the time."""
    ordered = sorted(entries, key=lambda entry: entry[:keys])
    return {
        key: curve_of([(number(size), number(us)) for *_, size, us in group])
        for key, group in itertools.groupby(ordered, key=lambda entry: entry[:keys])
    }


def surfaces(entries: Sequence[Entry], *, keys: int) -> Surfaces:
    """Surfaces over the second last column, then the column before it; the last column is the
    time."""
    by_key: dict[Entry, list[tuple[float, Curve]]] = {}
    for key, curve in curves(entries, keys=keys + 1).items():
        by_key.setdefault(key[:keys], []).append((number(key[keys]), curve))
    return {
        key: Surface(tuple(size for size, _ in known), tuple(curve for _, curve in known))
        for key, known in by_key.items()
    }


def exchanges(entries: Sequence[Entry], *, near: Sequence[Entry] = ()) -> dict[float, Exchange]:
    """Exchanges by number of nodes, the first column; then come tokens and the time of each way.
    `near` are entries within a node, without the first column."""
    rows = [*((1.0, *entry) for entry in near), *entries]
    dispatch = curves([row[:3] for row in rows], keys=1)
    combine = curves([(*row[:2], row[3]) for row in rows], keys=1)
    return {number(key[0]): Exchange(dispatch[key], combine[key]) for key in dispatch}


def nearest(tables: Mapping[float, Exchange], nodes: int) -> Exchange:
    """The exchange of the next larger measured count of 1, 2, 4 and 8 nodes; more behave like 8."""
    return tables[min((count for count in tables if count >= nodes), default=max(tables))]


def curve_of(points: Sequence[tuple[float, float]]) -> Curve:
    """A curve through points; repeated measurements of one size count as their mean."""
    groups = itertools.groupby(sorted(points), key=lambda point: point[0])
    means = [(size, _mean([time for _, time in group])) for size, group in groups]
    if not all(math.isfinite(time) and time > 0 for _, time in means):
        raise BadInput(f"a measured time is not above 0 among {means}")
    return Curve(tuple(size for size, _ in means), tuple(time for _, time in means))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def number(value: float | str) -> float:
    if isinstance(value, str):
        raise BadInput(f"{value!r} is not a number, and its column holds numbers")
    return value
