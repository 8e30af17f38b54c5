"""Policies on recorded traces, and a check that a trace replays as it was written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from ess import console
from ess.bench.harness.output.agreement import agreement
from ess.bench.harness.report import Row, compare
from ess.bench.locality.analysis import between_layers
from ess.pool.lru.arena import BLOCK_SLOTS
from ess.pool.lru.eviction import PolicyName
from ess.sim.locality import laboratory
from ess.sim.locality.laboratory import Outcome, Start
from ess.sim.locality.oracles import Min, next_uses
from ess.sim.locality.policies import Fifo, PlannerArena, Policy, Random, SelectionEma
from ess.sim.locality.selections import LayerProfile, RequestLoad
from ess.sim.locality.similarity import step_similarity
from ess.sim.locality.stack_distances import MissCurve, miss_curve
from ess.sim.locality.workloads import Workload, generated, recorded, write_trace
from ess.trace import TraceReader
from ess.units import div_ceil

WINDOWS: Final = 32
MULTIPLES: Final = (1.5, 2.0, 3.0, 4.0)
JUDGED: Final[tuple[PolicyName, ...]] = ("lru", "sieve", "score")
GROUPS_MAX: Final = 8
Judged: TypeAlias = defaultdict[tuple[float, str], list[float]]


def recorded_rows(path: Path, *, recover: bool = False) -> list[Row]:
    """Misses per step of up to eight groups, spread over all, in pools of 1.5 to 4 times top-k."""
    with TraceReader(path, recover=recover) as reader:
        header = reader.header
        if left := reader.dropped_bytes:
            steps = f"{len(reader):,} whole steps are read"
            console.note(f"{path}: {steps}; {left:,} bytes behind them are left out")
        groups = np.linspace(0, header.group_count - 1, min(GROUPS_MAX, header.group_count))
        lead = min(len(reader) // 4, div_ceil(WINDOWS, header.mtp))
        rows: list[Row] = []
        judged: Judged = defaultdict(list)
        for group in sorted({round(float(place)) for place in groups}):
            workload = recorded(reader, group=group, lead_steps=lead)
            rows += _group_rows(workload, group, header.top_k, judged)
            if group > 0:
                alike, config = between_layers(reader, group), {"group": group}
                rows.append(Row(name="inter-layer similarity", value=alike, unit="", config=config))
        return [*rows, *_judged_rows(judged, header.top_k)]


def _judged_rows(judged: Judged, top_k: int) -> list[Row]:
    """For each policy of the pool, the mean over groups against the mean of MIN."""
    rows = []
    for (multiple, name), misses in judged.items():
        if name == "min" or not (least := float(np.mean(judged[multiple, "min"]))):
            continue
        mean = float(np.mean(misses))
        rows.append(
            Row(
                name=f"misses over MIN at {multiple:g} top-k, {name}",
                value=mean / least,
                unit="x",
                config={
                    "slots": slots_of(multiple, top_k),
                    "groups": len(misses),
                    "misses": round(mean, 1),
                    "min": round(least, 1),
                },
            )
        )
    return rows


def slots_of(multiple: float, top_k: int) -> int:
    return max(1, round(multiple * top_k / BLOCK_SLOTS)) * BLOCK_SLOTS


def _group_rows(workload: Workload, group: int, top_k: int, judged: Judged) -> list[Row]:
    curve = miss_curve(workload)
    used = len(set().union(*(set(step.rows[step.rows >= 0].tolist()) for step in workload.steps())))
    alike = step_similarity(step.rows for step in workload.steps())
    config: dict[str, Any] = {"group": group, "steps": workload.step_count, "rows_used": used}
    rows = [Row(name="intra-layer similarity", value=alike, unit="", config=config)]
    for multiple in MULTIPLES:
        slots = slots_of(multiple, top_k)
        policies = _policies(workload, slots, top_k)
        outcomes = laboratory.run(workload, policies, start=Start(warm=True))
        for name in outcomes.keys() & {*JUDGED, "min"}:
            judged[multiple, name].append(outcomes[name].mean())
        rows += _size_rows(workload, curve, outcomes, top_k, config | {"slots": slots})
    return rows


def _size_rows(
    workload: Workload,
    curve: MissCurve,
    outcomes: Mapping[str, Outcome],
    top_k: int,
    config: dict[str, Any],
) -> list[Row]:
    slots = config["slots"]
    arena = PlannerArena(workload, slots=slots, top_k=top_k)
    cold = laboratory.run(workload, {"lru": arena})["lru"].mean()
    lru = outcomes["lru"].mean()
    rows = [Row(name="misses per step, lru from cold", value=cold, unit="rows", config=config)]
    if slots >= curve.slots_min:
        exact = curve.at(slots)
        rows.append(
            Row(
                name="misses per step, exact curve from cold",
                value=exact,
                unit="rows",
                config=config,
            )
        )
    for name, outcome in outcomes.items():
        if lru > 0 and outcome.mean() > 0:
            rows.append(
                compare(
                    name=f"misses per step, {name} warmed",
                    unit="rows",
                    ours=[outcome.mean()],
                    baseline=("lru warmed", [lru]),
                    config=config,
                )
            )
    return rows


def _policies(workload: Workload, slots: int, top_k: int) -> dict[str, Policy]:
    """The pool's own policies, run by its planner; score only if the trace has scores."""
    future = next_uses(workload)
    names = JUDGED if next(workload.steps()).seen is not None else JUDGED[:-1]
    pools: dict[str, Policy] = {
        name: PlannerArena(workload, slots=slots, top_k=top_k, evict=name) for name in names
    }
    return pools | {
        "fifo": Fifo(workload, slots=slots),
        "random": Random(workload, slots=slots),
        "selection EMA": SelectionEma(workload, slots=slots),
        "min": Min(workload, slots=slots, future=future),
        "min with bypass": Min(workload, slots=slots, future=future, bypass=True),
    }


def replay_row(path: Path) -> Row:
    """The generator's own misses, and those of the same request written, read and replayed."""
    load = RequestLoad(context=2048, step_count=60, query_count=2, top_k=128, recent=16, seed=8)
    profiles = [LayerProfile(hot=400, cold=6), LayerProfile(hot=700, cold=12)]
    header = write_trace(path, load, profiles, layout="generated")
    totals = [0, 0]
    with TraceReader(path) as reader:
        for group, profile in enumerate(profiles):
            workloads = (
                generated(load, profile, layer=group, window_count=0),
                recorded(reader, group=group),
            )
            for side, workload in enumerate(workloads):
                arena = PlannerArena(workload, slots=448, top_k=load.top_k)
                totals[side] += sum(laboratory.run(workload, {"lru": arena})["lru"].misses)
    return agreement(
        name="misses of a trace that was written and replayed",
        unit="rows",
        ours=totals[1],
        published=("generated", totals[0]),
        tolerance=0.0,
        config={"groups": header.group_count, "steps": load.step_count},
    )
