"""How well the generator reproduces the published miss curves and similarity.

Every n-th layer in the order of published misses is sampled and stands for n layers, and the
unusual layer 17 for itself: together 61.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from ess import console
from ess.bench.harness.output.agreement import agreement
from ess.bench.harness.report import Row
from ess.sim import published
from ess.sim.locality import profiles
from ess.sim.locality.selections import LayerStream, RequestLoad
from ess.sim.locality.similarity import step_similarity
from ess.sim.locality.stack_distances import MissCurve, miss_curve
from ess.sim.locality.workloads import generated

QUERY_COUNT: Final = 2
TOLERANCE: Final = 0.20
SHOWN_RATIOS: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)
SEED: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The contexts, and how many layers one sampled layer stands for."""

    contexts: tuple[int, ...]
    weight: int
    step_count: int
    skip: int

    @classmethod
    def full(cls) -> Sample:
        return cls(contexts=tuple(published.mean_misses()), weight=4, step_count=150, skip=50)

    @classmethod
    def smoke(cls) -> Sample:
        return cls(contexts=(32 * 1024,), weight=12, step_count=70, skip=30)

    def layers(self) -> tuple[int, ...]:
        """The sampled layers, then layer 17."""
        ordinary = [i for i in range(profiles.LAYER_COUNT) if i != profiles.STRANGE_LAYER]
        ordinary.sort(key=published.layer_misses()[32 * 1024, 0.2].__getitem__)
        return (*ordinary[self.weight // 2 :: self.weight], profiles.STRANGE_LAYER)

    def weight_of(self, layer: int) -> int:
        return 1 if layer == profiles.STRANGE_LAYER else self.weight

    def load(self, context: int) -> RequestLoad:
        return RequestLoad(
            context=context, step_count=self.step_count, query_count=QUERY_COUNT, seed=SEED
        )


def layer_curves(sample: Sample, context: int) -> dict[int, MissCurve]:
    """Curves from full arenas: the slots of a long-running request are never empty."""
    curves = {}
    for layer in sample.layers():
        console.note(f"  miss curve of layer {layer}, context {context:,} ...")
        workload = generated(
            sample.load(context), profiles.profile(layer), layer=layer, window_count=0
        )
        filled = np.random.default_rng([SEED, layer]).permutation(workload.row_count)
        curves[layer] = miss_curve(workload, skip=sample.skip, filled=filled.astype(np.int32))
    return curves


def mean_misses(sample: Sample, curves: Mapping[int, MissCurve], slots: int) -> float:
    weighted = sum(sample.weight_of(layer) * curves[layer].exact[slots] for layer in curves)
    return float(weighted / sum(map(sample.weight_of, curves)))


def curve_rows(sample: Sample, curves_32k: Mapping[int, MissCurve]) -> list[Row]:
    """The generator was fitted only to the ratios 0.2 and 0.3 at 32K."""
    rows = []
    for context in sample.contexts:
        curves = curves_32k if context == 32 * 1024 else layer_curves(sample, context)
        for ratio in SHOWN_RATIOS:
            wanted = published.mean_misses()[context][ratio]
            rows.append(
                agreement(
                    name="misses per layer and step, generated",
                    unit="rows",
                    ours=mean_misses(sample, curves, int(ratio * context)),
                    published=("ESS paper", wanted),
                    tolerance=TOLERANCE,
                    config={"context": context, "ratio": ratio, "layers": len(curves)},
                )
            )
    return rows


def strange_rows(curves_32k: Mapping[int, MissCurve]) -> list[Row]:
    layer, context = profiles.STRANGE_LAYER, 32 * 1024
    listed = published.layer_misses()
    given = {ratio: listed[context, ratio][layer] for at, ratio in listed if at == context}
    return [
        agreement(
            name="misses of layer 17, generated",
            unit="rows",
            ours=curves_32k[layer].at(int(ratio * context)),
            published=("ESS paper", wanted),
            tolerance=TOLERANCE,
            config={"context": context, "ratio": ratio},
        )
        for ratio, wanted in (given | profiles.STRANGE_LAYER_32K).items()
    ]


def similarity_row(sample: Sample) -> Row:
    """The generator was not fitted to similarity."""
    load = sample.load(32 * 1024)
    similarities = []
    for layer in sample.layers():
        stream = LayerStream(load, profiles.profile(layer), layer=layer)
        alike = step_similarity(stream.step().selection for _ in range(10))
        similarities += [alike] * sample.weight_of(layer)
    return agreement(
        name="intra-layer similarity, generated",
        unit="",
        ours=float(np.mean(similarities)),
        published=("ESS paper", profiles.MEAN_SIMILARITY_32K),
        tolerance=TOLERANCE,
        config={"context": 32 * 1024},
    )
