"""The policy laboratory against published numbers, against brute force, and on recorded traces."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ess import console
from ess.bench.harness.output.agreement import agreement
from ess.bench.harness.report import Row, compare
from ess.bench.locality import lru_bruteforce
from ess.bench.locality.budgets import budget_rows
from ess.bench.locality.fidelity import (
    Sample,
    curve_rows,
    layer_curves,
    similarity_row,
    strange_rows,
)
from ess.bench.locality.replay import recorded_rows, replay_row
from ess.errors import BadInput
from ess.sim.locality import laboratory, profiles
from ess.sim.locality.laboratory import Outcome, Start
from ess.sim.locality.oracles import Min, next_uses
from ess.sim.locality.policies import (
    Fifo,
    PlannerArena,
    Policy,
    Random,
    ScoreEma,
    SelectionEma,
    Sieve,
)
from ess.sim.locality.selections import LayerProfile, RequestLoad
from ess.sim.locality.similarity import NeighbourFetch, neighbour_fetch
from ess.sim.locality.stack_distances import miss_curve
from ess.sim.locality.workloads import Workload, generated

TOP_K: Final = 2048
CONTEXT: Final = 32 * 1024
SLOTS: Final = 6528
AHEAD: Final = 128
KINSHIP: Final = 0.92
SKIP: Final = 40
NEIGHBOUR_LAYERS: Final = (5, 17, 18, 30, 45, 55)


def policies_benchmark(
    *, smoke: bool, trace: Path | None = None, recover: bool = False
) -> list[Row]:
    """Which row gives way: policies, miss curves and budgets.

    Parameters
    ----------
    trace
        Work on this recorded trace instead of generated selections.
    recover
        Read the whole steps of a trace that is cut off, damaged, or was never closed.
    """
    if trace is not None:
        return recorded_rows(trace, recover=recover)
    if recover:
        raise BadInput("--recover reads a recorded trace: give --trace FILE too")
    sample = Sample.smoke() if smoke else Sample.full()
    curves_32k = layer_curves(sample, CONTEXT)
    step_count = 80 if smoke else 240
    return [
        *curve_rows(sample, curves_32k),
        *strange_rows(curves_32k),
        similarity_row(sample),
        *other_model_rows(step_count),
        *policy_rows(step_count),
        *warm_up_rows(),
        *brute_rows(),
        _replayed(),
        *neighbour_rows(smoke=smoke),
        *budget_rows(sample, curves_32k),
    ]


def _replayed() -> Row:
    with tempfile.TemporaryDirectory() as folder:
        return replay_row(Path(folder) / "generated.trace")


def every_policy(workload: Workload, *, slots: int) -> dict[str, Policy]:
    console.note(f"  every policy, {slots:,} slots, {workload.step_count} steps ...")
    future = next_uses(workload)
    return {
        "lru": PlannerArena(workload, slots=slots, top_k=TOP_K),
        "sieve": Sieve(workload, slots=slots),
        "fifo": Fifo(workload, slots=slots),
        "random": Random(workload, slots=slots),
        "selection EMA": SelectionEma(workload, slots=slots),
        "score EMA": ScoreEma(workload, slots=slots),
        "min": Min(workload, slots=slots, future=future),
        "min with bypass": Min(workload, slots=slots, future=future, bypass=True),
    }


def other_model_rows(step_count: int) -> list[Row]:
    """The generator was not fitted to GLM-5.1: only the order of policies must hold."""
    slots = 2 * TOP_K
    load = RequestLoad(context=CONTEXT, step_count=step_count, seed=2)
    workload = generated(load, LayerProfile())
    outcomes = laboratory.run(workload, every_policy(workload, slots=slots), start=Start(fill=True))
    percent = {name: outcome.mean(skip=SKIP) / TOP_K * 100 for name, outcome in outcomes.items()}
    config = {"context": CONTEXT, "slots": slots, "queries": 1}
    rows = [
        agreement(
            name=f"{name}, misses of selected rows, generated",
            unit="%",
            ours=percent[name],
            published=("GLM-5.1", wanted),
            config=config,
        )
        for name, wanted in profiles.POLICY_MISS_PERCENT.items()
    ]
    order = sorted(profiles.POLICY_MISS_PERCENT, key=profiles.POLICY_MISS_PERCENT.__getitem__)
    right = sum(percent[a] < percent[b] for a, b in itertools.pairwise(order))
    return [
        *rows,
        agreement(
            name="policy ordering, neighbours in the published order",
            unit="pairs",
            ours=right,
            published=("GLM-5.1", len(order) - 1),
            tolerance=0.0,
            config={"order": " < ".join(sorted(percent, key=percent.__getitem__))},
        ),
    ]


def policy_rows(step_count: int) -> list[Row]:
    """All policies at the engine's working point: 6,528 slots, two queries a step."""
    load = RequestLoad(context=CONTEXT, step_count=step_count, query_count=2, seed=3)
    workload = generated(load, LayerProfile())
    config = {"context": CONTEXT, "slots": SLOTS, "queries": 2}
    plain = laboratory.run(workload, every_policy(workload, slots=SLOTS), start=Start(fill=True))
    lru = plain["lru"].mean(skip=SKIP)
    others = {name: outcome for name, outcome in plain.items() if name != "lru"}
    rows = [_against_lru(name, outcome, lru, config) for name, outcome in others.items()]
    policies = every_policy(workload, slots=SLOTS)
    ahead = laboratory.run(
        workload,
        {name: policies[name] for name in ("lru", "score EMA")},
        start=Start(fill=True, ahead=AHEAD),
    )
    for name, outcome in ahead.items():
        extra = {
            "ahead_per_step": round(outcome.ahead_count / step_count),
            "useful": f"{outcome.useful_count / max(1, outcome.ahead_count):.0%}",
        }
        rows.append(_against_lru(f"{name} + threshold prefetch", outcome, lru, config | extra))
    return rows


def _against_lru(name: str, outcome: Outcome, lru: float, config: dict[str, Any]) -> Row:
    return compare(
        name=f"{name}, misses per step, generated",
        unit="rows",
        ours=[outcome.mean(skip=SKIP)],
        baseline=("lru", [lru]),
        config=config,
    )


def warm_up_rows() -> list[Row]:
    """The first step of a new request, warmed by 32 windows or not."""
    load = RequestLoad(context=CONTEXT, step_count=12, seed=4)
    workload = generated(load, LayerProfile())
    config = {"context": CONTEXT, "slots": SLOTS, "queries": 1}
    first, early = {}, {}
    for name, start in (("cold", Start()), ("warm", Start(warm=True, fill=True))):
        arena = PlannerArena(workload, slots=SLOTS, top_k=TOP_K)
        misses = laboratory.run(workload, {"lru": arena}, start=start)["lru"].misses
        first[name], early[name] = misses[0], misses[:10]
    return [
        compare(
            name="first step after a handoff, misses",
            unit="rows",
            ours=[first["warm"]],
            baseline=("no warm-up", [first["cold"]]),
            config=config | {"windows": len(workload.windows)},
        ),
        compare(
            name="first ten steps after a handoff, misses",
            unit="rows",
            ours=[sum(early["warm"])],
            baseline=("no warm-up", [sum(early["cold"])]),
            config=config,
        ),
    ]


def brute_rows() -> list[Row]:
    """Targets of exactly 1: the same misses, step by step for LRU, in sum for MIN."""
    load = RequestLoad(context=400, step_count=40, query_count=2, top_k=32, recent=2, seed=5)
    workload = generated(load, LayerProfile(hot=70, cold=3, drift=1.0))
    arena = PlannerArena(workload, slots=64, top_k=32)
    misses = laboratory.run(workload, {"lru": arena})["lru"].misses
    wanted = lru_bruteforce.lru_misses(workload, slots=64)
    same = sum(a == b for a, b in zip(misses, wanted, strict=True))
    rows = [_equal("planner LRU, steps that miss as a dictionary does", same, len(wanted))]
    curve = miss_curve(workload)
    sizes = range(curve.slots_min, workload.row_count + 1, 23)
    exact = sum(
        round(curve.at(slots) * load.step_count)
        == sum(lru_bruteforce.recency_misses(workload, slots=slots))
        for slots in sizes
    )
    rows.append(_equal("exact curve, sizes that equal a simulation", exact, len(sizes)))
    tiny = generated(
        RequestLoad(context=7, step_count=6, top_k=3, seed=6),
        LayerProfile(hot=6, cold=1, drift=0.2),
    )
    for bypass in (False, True):
        policy = Min(tiny, slots=5, future=next_uses(tiny), bypass=bypass)
        total = sum(laboratory.run(tiny, {"min": policy})["min"].misses)
        least = lru_bruteforce.fewest_misses(tiny, slots=5, bypass=bypass)
        rows.append(_equal(f"MIN{' with bypass' * bypass}, misses against all sets", total, least))
    return rows


def _equal(name: str, ours: int, wanted: int) -> Row:
    return agreement(
        name=name, unit="", ours=ours, published=("brute force", wanted), tolerance=0.0
    )


def neighbour_rows(*, smoke: bool) -> list[Row]:
    """The authors' inter-layer prefetch, without kinship and with the one that fits their mean."""
    if smoke:
        return _neighbours(KINSHIP, NEIGHBOUR_LAYERS[:1], step_count=40, tolerance=None)
    return [
        *_neighbours(0.0, NEIGHBOUR_LAYERS, step_count=120, tolerance=None),
        *_neighbours(KINSHIP, NEIGHBOUR_LAYERS, step_count=120, tolerance=0.2),
    ]


def _neighbours(
    kinship: float, layers: Sequence[int], *, step_count: int, tolerance: float | None
) -> list[Row]:
    load = RequestLoad(context=CONTEXT, step_count=step_count, kinship=kinship, seed=7)
    fetches = [
        neighbour_fetch(
            load,
            (profiles.profile(layer - 1), profiles.profile(layer)),
            layer=layer,
            slots=SLOTS,
            skip=10,
        )
        for layer in layers
    ]
    config = {"kinship": kinship, "slots": SLOTS, "layers": len(layers)}
    return _neighbour_report(fetches, config, tolerance=tolerance)


def _neighbour_report(
    fetches: list[NeighbourFetch], config: dict[str, Any], *, tolerance: float | None
) -> list[Row]:
    fetched, useful, missed, alike = (
        float(np.mean([getattr(fetch, name) for fetch in fetches]))
        for name in ("fetched", "useful", "missed", "similarity")
    )
    shown = config | {"inter_layer_similarity": round(alike, 2)}
    return [
        agreement(
            name="inter-layer prefetch, rows fetched per step, generated",
            unit="rows",
            ours=fetched,
            published=("ESS authors", profiles.USELESS_ROWS_MEAN),
            tolerance=tolerance,
            config=shown,
        ),
        agreement(
            name="inter-layer prefetch, most rows in a step, generated",
            unit="rows",
            ours=max(fetch.fetched_max for fetch in fetches),
            published=("ESS authors", profiles.USELESS_ROWS_MAX),
            tolerance=tolerance,
            config=shown,
        ),
        Row(
            name="inter-layer prefetch, share of fetched rows that were missed, generated",
            value=useful / fetched * 100,
            unit="%",
            config=shown | {"misses_avoided": f"{useful:.0f} of {missed:.0f}"},
        ),
    ]
