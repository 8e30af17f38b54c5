"""Miss curves counted with the product's planner on generated selections, not published ones.

Some layers, chosen across the range of misses, are drawn at two contexts; the same steps go through
arenas of every size at once, each warmed and filled as an arriving request is. The result is the
mean over layers at each ratio of slots to context; the shape over layers stays as published.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ess.errors import BadInput
from ess.pool.lru.arena import BLOCK_SLOTS
from ess.sim.locality import laboratory, profiles
from ess.sim.locality.laboratory import Start
from ess.sim.locality.misses import PUBLISHED_QUERIES, MissCurves
from ess.sim.locality.policies import PlannerArena
from ess.sim.locality.selections import RequestLoad
from ess.sim.locality.workloads import generated
from ess.sim.operators.paper import TOP_K
from ess.sim.operators.tables import Curve
from ess.sim.published import layer_misses

CONTEXTS: Final = (32_768, 131_072)
RATIOS: Final = (0.05, 0.1, 0.2, 0.3, 0.5, 0.9)
LAYERS: Final = 10
STEPS: Final = 96
SKIP: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class MissAgreement:
    """Misses per request and layer in one step of two queries, by LRU and as published."""

    context: int
    ratio: float
    lru: float
    published: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """How much is drawn; a step verifies `queries_each` tokens."""

    queries_each: int = PUBLISHED_QUERIES
    contexts: tuple[int, ...] = CONTEXTS
    ratios: tuple[float, ...] = RATIOS
    layers: int = LAYERS
    steps: int = STEPS
    skip: int = SKIP
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.contexts and len(self.ratios) > 1 and self.layers and self.queries_each > 0):
            raise BadInput(f"{self}: a context, two ratios, a layer and a query are the least")
        if not 0 <= self.skip < self.steps:
            raise BadInput(f"skip {self.skip} of {self.steps} steps leaves none to count")


def lru_curves(shape_of: MissCurves, drawing: Drawing) -> MissCurves:
    """Means counted with the planner, with the shape over the layers of `shape_of`."""
    means = {}
    for context in drawing.contexts:
        means_by_ratio = _means(context, drawing)
        means[context] = Curve(
            tuple(means_by_ratio),
            tuple(math.log(max(miss, 1e-3)) for miss in means_by_ratio.values()),
        )
    return MissCurves(means=means, shapes=shape_of.shapes)


def agreement(lru: MissCurves, published: MissCurves) -> list[MissAgreement]:
    """Both at every published ratio; below the smallest one curves are extrapolated."""
    least = min(curve.sizes[0] for curve in published.means.values())
    return [
        MissAgreement(
            context=context,
            ratio=ratio,
            lru=math.exp(logarithm),
            published=published.mean(context=context, slots=ratio * context),
        )
        for context, curve in lru.means.items()
        for ratio, logarithm in zip(curve.sizes, curve.times, strict=True)
        if ratio >= least
    ]


def sampled_layers(count: int) -> list[int]:
    """Layers in the middle of equal parts of all layers, ordered by their misses at 32K."""
    every = layer_misses()[32_768, 0.2]
    order = sorted(range(len(every)), key=every.__getitem__)
    if count > len(order):
        raise BadInput(f"{count} layers: there are {len(order)}")
    return [order[int((part + 0.5) * len(order) / count)] for part in range(count)]


def _means(context: int, drawing: Drawing) -> Mapping[float, float]:
    """Means by ratio, over the sampled layers and the counted steps, for two queries."""
    totals = dict.fromkeys(drawing.ratios, 0.0)
    for layer in sampled_layers(drawing.layers):
        load = RequestLoad(
            context=context,
            step_count=drawing.steps,
            query_count=drawing.queries_each,
            seed=drawing.seed,
        )
        workload = generated(load, profiles.profile(layer), layer=layer)
        arenas = {
            str(ratio): PlannerArena(workload, slots=_slots(ratio * context), top_k=TOP_K)
            for ratio in drawing.ratios
        }
        outcomes = laboratory.run(workload, arenas, start=Start(warm=True, fill=True))
        for ratio in drawing.ratios:
            totals[ratio] += outcomes[str(ratio)].mean(skip=drawing.skip)
    scale = PUBLISHED_QUERIES / drawing.queries_each / drawing.layers
    return {ratio: scale * total for ratio, total in totals.items()}


def _slots(wanted: float) -> int:
    return max(1, round(wanted / BLOCK_SLOTS)) * BLOCK_SLOTS
