"""How similar selections are, by the paper's formulas, and how useful a neighbour layer's is.

Similarity is containment: the share of a query's selection that another selection has too. Between
consecutive queries of one layer it is the intra-layer similarity; between one layer and the next,
for the same query, the inter-layer one.

The inter-layer prefetch fetches, for each layer, every row that its predecessor selected and that
the layer's arena lacks. Rows go to a staging area: the arena stays a plain LRU's, so every useful
row is a miss avoided, and every other row was moved for nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ess.sim.locality.policies import PlannerArena
from ess.sim.locality.selections import LayerProfile, RequestLoad
from ess.sim.locality.workloads import distinct, generated


def containment(other: npt.NDArray[Any], selection: npt.NDArray[Any]) -> float:
    """|other & selection| / |selection|, of distinct non-negative positions."""
    chosen = distinct(selection)
    return float(np.isin(chosen, other).sum() / max(1, chosen.size))


def step_similarity(selections: Iterable[npt.NDArray[Any]]) -> float:
    """Mean containment of each query's selection in that of the query before."""
    queries = [query for selection in selections for query in selection]
    pairs = itertools.pairwise(queries)
    return float(np.mean([containment(before, now) for before, now in pairs]))


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourFetch:
    """Rows per step: missed without prefetch, prefetched, and useful of these."""

    similarity: float
    missed: float
    fetched: float
    fetched_max: int
    useful: float


def neighbour_fetch(
    load: RequestLoad,
    profiles: tuple[LayerProfile, LayerProfile],
    *,
    layer: int,
    slots: int,
    skip: int,
) -> NeighbourFetch:
    """The prefetch of `layer` from the selections of the layer before it."""
    above = generated(load, profiles[0], layer=layer - 1)
    below = generated(load, profiles[1], layer=layer)
    arena = PlannerArena(below, slots=slots, top_k=load.top_k)
    arena.warm(below.windows)
    steps = []
    for hint, step in zip(above.steps(), below.steps(), strict=True):
        hinted = distinct(hint.rows)
        absent = hinted[~arena.resident()[hinted]]
        missing = arena.access(step)
        useful = int(np.isin(absent, missing).sum())
        alike = np.mean([containment(a, b) for a, b in zip(hint.rows, step.rows, strict=True)])
        steps.append((float(alike), missing.size, absent.size, useful))
    counted = np.array(steps[skip:])
    similarity, missed, fetched, useful_rows = counted.mean(axis=0)
    return NeighbourFetch(
        similarity=float(similarity),
        missed=float(missed),
        fetched=float(fetched),
        fetched_max=int(counted[:, 2].max()),
        useful=float(useful_rows),
    )
