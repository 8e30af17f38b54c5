"""How many rows a layer misses: the published curves, as a function of context and slots.

The mean over layers was published for four contexts and nine ratios of slots to context, its shape
over the layers for three contexts; both for two queries per request and step. Between contexts the
mean is taken at equal slots, since misses follow the working set in slots (a cliff at about 3,200
slots, whatever the context). Between ratios its logarithm is linear. The curves are the sum of a
hot part, which depends on slots alone, and a cold tail: `COLD` times the share of the context
without a slot. Beyond the published contexts the hot part is that of the nearest one. Below the
smallest ratio of a context it grows as for the shortest context, whose curve goes on to the fewest
slots; below its own end the logarithm of that curve is extrapolated. With fewer slots than one
query selects, every row without a slot is missed. Misses grow with queries per step: as many
tokens, as much drift.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ess.errors import BadInput
from ess.sim.operators.paper import TOP_K
from ess.sim.operators.tables import Curve
from ess.sim.published import layer_misses, mean_misses

PUBLISHED_QUERIES: Final = 2
SHAPE_RATIO: Final = 0.2
COLD: Final = 130.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MissCurves:
    """Miss curves by context: the logarithm of the mean over the ratio, and each layer relative to
    the mean."""

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
        low, high = self._mean_at(below, slots), self._mean_at(above, slots)
        known = low + share * (high - low)
        if inside == context:
            return known
        return self._hot(known, inside, slots) + COLD * (1.0 - slots / context)

    @staticmethod
    def _hot(mean: float, context: int, slots: float) -> float:
        return max(0.0, mean - COLD * (1.0 - min(slots / context, 1.0)))

    def _mean_at(self, context: int, slots: float) -> float:
        ratio = min(slots / context, 1.0)
        curve = self.means[context]
        shortest = min(self.means)
        if ratio < curve.sizes[0] and context > shortest:
            least = curve.sizes[0] * context
            hot, hot_before = (
                self._hot(self._mean_at(shortest, count), shortest, count)
                for count in (slots, least)
            )
            return math.exp(curve.times[0]) + COLD * (least - slots) / context + hot - hot_before
        if ratio < curve.sizes[0]:
            steep = (curve.times[1] - curve.times[0]) / (curve.sizes[1] - curve.sizes[0])
            going_on = math.exp(curve.times[0] + steep * (ratio - curve.sizes[0]))
            return max(going_on, TOP_K - slots)
        if ratio > curve.sizes[-1]:
            left = math.exp(curve.times[-1])
            return left * (1.0 - ratio) / (1.0 - curve.sizes[-1])
        return math.exp(curve.at(ratio))

    def layers(self, *, context: int, slots: float, queries_each: int) -> tuple[float, ...]:
        """Misses per request in each layer and step, at most as many as are selected."""
        if context < 1 or slots < 0 or queries_each < 1:
            sizes = f"context {context}, slots {slots}, queries {queries_each}"
            raise BadInput(f"{sizes}: such a request cannot exist")
        mean = self.mean(context=context, slots=slots) * queries_each / PUBLISHED_QUERIES
        return self.spread(mean, context=context, queries_each=queries_each)

    def spread(self, mean: float, *, context: int, queries_each: int) -> tuple[float, ...]:
        """Spreads a mean over the layers, in the shape at the nearest published context."""
        nearest = min(self.shapes, key=lambda known: abs(math.log(known / context)))
        most = float(min(queries_each * TOP_K, context))
        return tuple(min(most, mean * part) for part in self.shapes[nearest])


def published(*, layer_count: int | None = None) -> MissCurves:
    """The published curves, their shape stretched over a model of `layer_count` layers."""
    return MissCurves(
        means={
            context: Curve(tuple(points), tuple(math.log(miss) for miss in points.values()))
            for context, points in mean_misses().items()
        },
        shapes={
            context: _stretched(_shape(misses), layer_count or len(misses))
            for (context, ratio), misses in layer_misses().items()
            if ratio == SHAPE_RATIO
        },
    )


def _shape(misses: Sequence[float]) -> tuple[float, ...]:
    mean = math.fsum(misses) / len(misses)
    return tuple(miss / mean for miss in misses)


def _stretched(shape: Sequence[float], layer_count: int) -> tuple[float, ...]:
    """The shape at as many points as there are layers, with a mean of 1 again."""
    values = [shape[layer * len(shape) // layer_count] for layer in range(layer_count)]
    mean = math.fsum(values) / layer_count
    return tuple(value / mean for value in values)
