"""How many rows a layer misses: the published curves, as a function of context and slots.

The mean over layers was published for four contexts and nine ratios of slots to context, its shape
over the layers for three contexts; both for two queries per request and step. Between contexts the
mean is taken at equal slots, since it is the working set in slots that makes misses (a cliff at
about 3,200 slots, whatever the context). Between ratios its logarithm is linear, and goes on so
below the smallest ratio. The curves are a hot part, which depends on slots alone, and a cold tail:
`COLD` times the share of the context without a slot. Beyond the published contexts the hot part is
that of the nearest one. Misses grow with queries per step: as many tokens, as much drift.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ess.errors import BadInput
from ess.sim.operators.stages import TOP_K
from ess.sim.operators.tables import Curve

FOLDER: Final = Path(__file__).resolve().parent.parent / "published"
PUBLISHED_QUERIES: Final = 2
COLD: Final = 130.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MissCurves:
    """By context: the logarithm of the mean over the ratio, and each layer over the mean."""

    means: Mapping[int, Curve]
    shapes: Mapping[int, tuple[float, ...]]

    def mean(self, *, context: int, slots: float) -> float:
        """Misses per request and layer, for two queries a step; none when all rows have slots."""
        if slots >= context:
            return 0.0
        contexts = sorted(self.means)
        inside = min(max(context, contexts[0]), contexts[-1])
        below = max(known for known in contexts if known <= inside)
        above = min(known for known in contexts if known >= inside)
        share = 0.0 if above == below else (inside - below) / (above - below)
        low, high = self._at(below, slots), self._at(above, slots)
        known = low + share * (high - low)
        if inside == context:
            return known
        hot = max(0.0, known - COLD * (1.0 - min(slots / inside, 1.0)))
        return hot + COLD * (1.0 - slots / context)

    def _at(self, context: int, slots: float) -> float:
        ratio = min(slots / context, 1.0)
        curve = self.means[context]
        if ratio < curve.sizes[0]:
            steep = (curve.times[1] - curve.times[0]) / (curve.sizes[1] - curve.sizes[0])
            return math.exp(curve.times[0] + steep * (ratio - curve.sizes[0]))
        if ratio > curve.sizes[-1]:
            left = math.exp(curve.times[-1])
            return left * (1.0 - ratio) / (1.0 - curve.sizes[-1])
        return math.exp(curve.at(ratio))

    def layers(self, *, context: int, slots: float, queries_each: int) -> tuple[float, ...]:
        """Misses per request in each layer and step, at most what is selected."""
        if context < 1 or slots < 0 or queries_each < 1:
            sizes = f"context {context}, slots {slots}, queries {queries_each}"
            raise BadInput(f"{sizes}: no such request")
        mean = self.mean(context=context, slots=slots) * queries_each / PUBLISHED_QUERIES
        return self.spread(mean, context=context, queries_each=queries_each)

    def spread(self, mean: float, *, context: int, queries_each: int) -> tuple[float, ...]:
        """A mean over the layers in the shape that it has at the nearest published context."""
        nearest = min(self.shapes, key=lambda known: abs(math.log(known / context)))
        most = float(min(queries_each * TOP_K, context))
        return tuple(min(most, mean * part) for part in self.shapes[nearest])


def published() -> MissCurves:
    return MissCurves(
        means={
            context: Curve(*zip(*((ratio, math.log(miss)) for ratio, miss in points), strict=True))
            for context, points in _read("mean_misses.csv").items()
        },
        shapes={
            context: _shape([miss for _, miss in points])
            for context, points in _read("layer_misses.csv").items()
        },
    )


def _shape(misses: list[float]) -> tuple[float, ...]:
    mean = math.fsum(misses) / len(misses)
    return tuple(miss / mean for miss in misses)


def _read(name: str) -> dict[int, list[tuple[float, float]]]:
    with (FOLDER / name).open(newline="") as lines:
        rows = [
            (int(line[0]), float(line[1]), float(line[2])) for line in list(csv.reader(lines))[1:]
        ]
    groups = itertools.groupby(rows, key=lambda row: row[0])
    return {context: [(at, miss) for _, at, miss in group] for context, group in groups}
