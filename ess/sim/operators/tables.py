"""Measured operator tables: read, checked, interpolated.

Between two measured points a time is linear. Beyond the last it continues with the slope of the
last two; below the first it stays the same, since a kernel never gets cheaper than its launch.
"""

from __future__ import annotations

import csv
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ess.errors import BadInput
from ess.sim.operators.derive import DERIVATIONS, derive

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Keys: `experts` by ranks and balance, `exchange` by nodes, `gemm` by n and k."""

    source: str
    attention: Surface
    experts: Mapping[tuple[int, str], Curve]
    dispatch: Mapping[int, Curve]
    combine: Mapping[int, Curve]
    shared: Curve
    gemm: Mapping[tuple[int, int], Curve]
    absorb: Mapping[str, Curve]


def load(package: Path | None = None, *, gpu: str = "h200", system: str = "h200_sxm") -> Tables:
    """The tables that ship with ESS, or those of an unpacked measurement package."""
    if package is None:
        return _build(_shipped(gpu), source=f"shipped {gpu} subset")
    return _build(derive(package, DERIVATIONS, system=system), source=str(package))


def _shipped(gpu: str) -> dict[str, list[Entry]]:
    return {
        derivation.name: entries_of(FOLDER / gpu / f"{derivation.name}.csv", derivation.columns)
        for derivation in DERIVATIONS
    }


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


def _build(entries: Mapping[str, Sequence[Entry]], *, source: str) -> Tables:
    exchange = entries["exchange"]
    return Tables(
        source=source,
        attention=_by_context(entries["attention"]),
        experts={
            (int(_number(ranks)), str(balance)): curve
            for (ranks, balance), curve in _by_key(entries["experts"], keys=(0, 1)).items()
        },
        dispatch=_by_nodes(entry[:3] for entry in exchange),
        combine=_by_nodes((entry[0], entry[1], entry[3]) for entry in exchange),
        shared=_by_key(entries["shared"], keys=())[()],
        gemm={
            (int(_number(n)), int(_number(k))): curve
            for (n, k), curve in _by_key(entries["gemm"], keys=(0, 1)).items()
        },
        absorb={str(key[0]): curve for key, curve in _by_key(entries["absorb"], keys=(0,)).items()},
    )


def _by_context(entries: Sequence[Entry]) -> Surface:
    curves = _by_key(entries, keys=(1,))
    contexts = sorted((_number(key[0]), curve) for key, curve in curves.items())
    return Surface(tuple(size for size, _ in contexts), tuple(curve for _, curve in contexts))


def _by_nodes(entries: Iterable[Entry]) -> dict[int, Curve]:
    curves = _by_key(list(entries), keys=(0,))
    return {int(_number(key[0])): curve for key, curve in curves.items()}


def _by_key(entries: Sequence[Entry], *, keys: Sequence[int]) -> dict[Entry, Curve]:
    """Curves over the only column that is neither a key nor the last, which is the time."""

    def key_of(entry: Entry) -> Entry:
        return tuple(entry[i] for i in keys)

    (size_at,) = set(range(len(entries[0]) - 1)) - set(keys)
    return {
        key: curve_of([(_number(entry[size_at]), _number(entry[-1])) for entry in group])
        for key, group in itertools.groupby(sorted(entries, key=key_of), key=key_of)
    }


def curve_of(points: Sequence[tuple[float, float]]) -> Curve:
    """A curve through points; repeated measurements of one size count as their mean."""
    groups = itertools.groupby(sorted(points), key=lambda point: point[0])
    means = [(size, _mean([time for _, time in group])) for size, group in groups]
    if not all(math.isfinite(time) and time > 0 for _, time in means):
        raise BadInput(f"a measured time is not above 0 among {means}")
    return Curve(tuple(size for size, _ in means), tuple(time for _, time in means))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _number(value: float | str) -> float:
    if isinstance(value, str):
        raise BadInput(f"{value!r} is not a number, and its column holds numbers")
    return value
