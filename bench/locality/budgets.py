"""Slots per layer by equal marginal benefit against the same total spread evenly, at 32K.

There are three curves per layer, the most extrapolated first: the power law through each layer's
two published points, continued below the smaller one down to one selection; the same law, bent
below that point to the published mean at a ratio of 0.1; and the generator's exact curves, which
have a cliff there. By the law alone quiet layers give up slots at little cost; the published mean
shows that they do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from ess.bench.harness.report import Row
from ess.bench.locality.fidelity import Sample
from ess.pool.budget import Curve, divide
from ess.sim.locality import profiles
from ess.sim.locality.stack_distances import MissCurve
from ess.sim.published import layer_misses, mean_misses

CONTEXT: Final = 32 * 1024
TOP_K: Final = 2048
SLOTS: Final = 6528
LEAST_GAIN: Final = 0.20
HIDDEN_MISSES: Final = 219


def budget_rows(sample: Sample, curves_32k: Mapping[int, MissCurve]) -> list[Row]:
    layers = range(profiles.LAYER_COUNT)
    laws = [digitised_curve(layer, bent=False) for layer in layers]
    bent = [digitised_curve(layer, bent=True) for layer in layers]
    exact = [
        curve.exact[: CONTEXT + 1]
        for layer, curve in curves_32k.items()
        for _ in range(sample.weight_of(layer))
    ]
    kinds = (("two-point law", laws), ("law bent to the mean at 0.1", bent), ("generated", exact))
    target = 1 / (1 - LEAST_GAIN)
    rows = [_row("misses per layer and step", curves, kind, target) for kind, curves in kinds]
    for kind, curves in kinds[1:]:
        exposed = [np.maximum(curve - HIDDEN_MISSES, 0) for curve in curves]
        rows.append(_row(f"misses beyond the {HIDDEN_MISSES} that DA hides", exposed, kind, None))
    return rows


def digitised_curve(layer: int, *, bent: bool) -> Curve:
    """misses = m(0.2) (ratio / 0.2)^-p with p from the two points of the layer."""
    all_02, all_03 = (layer_misses()[CONTEXT, at] for at in (0.2, 0.3))
    at_02, at_03 = all_02[layer], all_03[layer]
    power = np.log(at_02 / at_03) / np.log(0.3 / 0.2)
    ratio = np.maximum(np.arange(CONTEXT + 1), 1) / CONTEXT / 0.2
    curve: Curve = at_02 * ratio**-power
    if bent:
        steep = np.log2(mean_misses()[CONTEXT][0.1] / np.mean(all_02))
        curve = np.where(ratio < 1, np.maximum(curve, at_02 * ratio**-steep), curve)
    return curve


def _row(what: str, curves: Sequence[Curve], kind: str, target: float | None) -> Row:
    slots = divide(curves, total_slots=SLOTS * len(curves), slots_min=TOP_K)
    uniform = sum(float(curve[SLOTS]) for curve in curves) / len(curves)
    divided = sum(float(curve[count]) for curve, count in zip(curves, slots, strict=True))
    config: dict[str, Any] = {
        "curves": kind,
        "slots_mean": round(sum(slots) / len(slots)),
        "least": min(slots),
        "most": max(slots),
        "uniform_at_0.1": round(float(np.mean([curve[CONTEXT // 10] for curve in curves]))),
        "saved": f"{1 - divided / len(curves) / uniform:.0%}",
    }
    ours = divided / len(curves)
    return Row(
        name=f"{what}, divided budgets",
        value=ours,
        unit="rows",
        baseline="uniform",
        baseline_value=uniform,
        ratio=uniform / ours if ours else None,
        target=target,
        met=None if target is None else uniform >= target * ours,
        config=config,
    )
