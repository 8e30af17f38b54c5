"""The batches to try: an even grid over all that fit, finer ones around the best, then every batch
there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from ess.sim.planning.bands import Band
from ess.units import div_ceil

CANDIDATES_MAX: Final = 16
HEAVY_LINK: Final = 0.05
FILLED_MAX: Final = 64
"""A wider gap is searched by a grid first: plans for short contexts have gaps of thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One batch on one GPU, or on the GPUs of one attention group: then `batch` is the group's, the
    rate and `host_bytes` are those of one of its GPUs.

    `exposed_us` is the part of a step that waits for the host link, `exposed_ends_us` its least and
    most. `band` says how far `step_us` may be off, as shares of it, `rate_band` the same for
    `tokens_per_s`, `token_band` for `token_us`; `marks` name their unmeasured sources.
    """

    batch: int
    slots_each: int
    ratio: float
    tbo: bool
    step_us: float
    exposed_us: float
    token_us: float
    tokens_per_s: float
    modes: dict[str, int]
    host_bytes: int
    band: Band
    token_band: Band
    rate_band: Band
    exposed_ends_us: tuple[float, float]
    marks: tuple[str, ...]

    @property
    def is_link_heavy(self) -> bool:
        return self.exposed_us > HEAVY_LINK * self.step_us


def tried(
    most: int, point_of: Callable[[int], Point], is_kept: Callable[[Point], bool]
) -> list[Point]:
    """Points of batches from 1 to `most`, in order: those of the grids, and in the last grid all
    between the neighbours of the best point and of the largest kept point."""
    points = {batch: point_of(batch) for batch in spread(most)}
    while True:
        kept = [point for point in points.values() if is_kept(point)]
        edges = {best(kept).batch, max(point.batch for point in kept)} if kept else set()
        wanted = _untried_around(points, edges)
        if not wanted:
            return [points[batch] for batch in sorted(points)]
        points |= {batch: point_of(batch) for batch in wanted}


def best(points: Iterable[Point]) -> Point:
    """The point with the most tokens per second; among equals the smaller batch."""
    return max(points, key=lambda point: (point.tokens_per_s, -point.batch))


def _untried_around(known: Iterable[int], edges: set[int]) -> list[int]:
    """Untried batches between an edge and the nearest tried batches on both sides of it: all, or a
    grid."""
    pairs = list(itertools.pairwise(sorted(known)))
    return [
        batch
        for low, high in pairs
        if low in edges or high in edges
        for batch in _between(low, high)
    ]


def _between(low: int, high: int) -> range:
    step = 1 if high - low <= FILLED_MAX else div_ceil(high - low, CANDIDATES_MAX)
    return range(low + step, high, step)


def spread(most: int) -> list[int]:
    """At most `CANDIDATES_MAX` batches from 1 to `most`, evenly spread, with both ends."""
    if most <= CANDIDATES_MAX:
        return list(range(1, most + 1))
    step = (most - 1) / (CANDIDATES_MAX - 1)
    return sorted({1 + round(step * place) for place in range(CANDIDATES_MAX)})
