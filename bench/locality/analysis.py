"""The locality of a recorded trace: similarities, misses by ratio, the first steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from ess.errors import BadInput
from ess.pool.lru.arena import BLOCK_SLOTS
from ess.pool.warmup import WINDOW_MAX
from ess.sim.locality import laboratory
from ess.sim.locality.laboratory import Start
from ess.sim.locality.oracles import Min, next_uses
from ess.sim.locality.policies import PlannerArena
from ess.sim.locality.similarity import containment, step_similarity
from ess.sim.locality.workloads import Workload, recorded
from ess.trace import TraceReader

EARLY_STEPS: Final = 32


class Locality(msgspec.Struct, frozen=True, kw_only=True):
    """Per layer group, the MTP module last. Misses are rows per request and step.

    `lru` and `least` are [ratio][group]; `warm` and `cold` are [step], means over groups.
    """

    context: int
    mtp: int
    top_k: int
    ratios: list[float]
    within: list[float]
    between: list[float]
    lru: list[list[float]]
    least: list[list[float]]
    warm: list[float]
    cold: list[float]


def analyse(reader: TraceReader, *, context: int, ratios: list[float]) -> Locality:
    """The first 32 queries are the windows for warm-up, the others are replayed."""
    header = reader.header
    lead = WINDOW_MAX // header.mtp
    if len(reader) <= lead:
        raise BadInput(
            f"{len(reader)} steps are recorded, the first {lead} only warm the arena: record more"
        )
    groups = range(header.group_count)
    loads = [recorded(reader, group=group, lead_steps=lead) for group in groups]
    lru, least = [], []
    for ratio in ratios:
        slots = slots_for(ratio, context)
        lru.append([_series(load, slots, header.top_k, Start(warm=True)) for load in loads])
        least.append([_least(load, slots) for load in loads])
    slots = slots_for(0.2, context)
    warm, cold = (
        np.mean([_series(load, slots, header.top_k, start) for load in loads], axis=0)
        for start in (Start(warm=True), Start())
    )
    return Locality(
        context=context,
        mtp=header.mtp,
        top_k=header.top_k,
        ratios=ratios,
        within=[step_similarity(step.rows for step in load.steps()) for load in loads],
        between=[between_layers(reader, group) for group in groups[1:]],
        lru=[[float(np.mean(misses)) for misses in line] for line in lru],
        least=least,
        warm=[float(misses) for misses in warm[:EARLY_STEPS]],
        cold=[float(misses) for misses in cold[:EARLY_STEPS]],
    )


def slots_for(ratio: float, context: int) -> int:
    return max(BLOCK_SLOTS, int(ratio * context) // BLOCK_SLOTS * BLOCK_SLOTS)


def _series(load: Workload, slots: int, top_k: int, start: Start) -> list[int]:
    arena = PlannerArena(load, slots=slots, top_k=top_k)
    return laboratory.run(load, {"lru": arena}, start=start)["lru"].misses


def _least(load: Workload, slots: int) -> float:
    policy = Min(load, slots=slots, future=next_uses(load), bypass=True)
    return laboratory.run(load, {"min": policy}, start=Start(warm=True))["min"].mean()


def between_layers(reader: TraceReader, group: int) -> float:
    """The share of a query's selection in this group that it also selected in the group before."""
    alike = [
        containment(above, below)
        for step in reader
        for above, below in zip(step.selection(group - 1), step.selection(group), strict=True)
    ]
    return float(np.mean(alike))


def listed(values: Sequence[float], digits: int = 0) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values)
