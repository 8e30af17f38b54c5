"""How local a real language model's selections are: a guest's, layer by layer.

The guest reads a text in the forms in which it is served; its indexer's selections are recorded,
then replayed through the pool's planner under each of its policies, and under MIN.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ess import console
from ess.bench.harness.prefix import Prefix, build_prefix, prefix_row
from ess.bench.harness.report import Row
from ess.bench.harness.text import text_of
from ess.bench.harness.threads import compute_threads
from ess.bench.locality.analysis import between_layers, listed
from ess.bench.locality.record_trace import record
from ess.bench.locality.replay import JUDGED, MULTIPLES, slots_of
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.models.guest.pins import guest_named
from ess.models.guest.place import checkpoint_folder
from ess.models.load import load_model
from ess.models.model import Model
from ess.models.text.tokenizer import Tokenizer
from ess.pool.budget import divide
from ess.pool.warmup import WINDOW_MAX
from ess.sim.locality import laboratory
from ess.sim.locality.laboratory import Start
from ess.sim.locality.oracles import Min, next_uses
from ess.sim.locality.policies import PlannerArena, Policy
from ess.sim.locality.similarity import step_similarity
from ess.sim.locality.stack_distances import miss_curve
from ess.sim.locality.workloads import Workload, recorded
from ess.trace import TraceReader

WARMED_AT: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestRecording:
    model: str
    context: int
    queries: int
    top_k: int
    text: Path | None = None
    record: Path | None = None


@compute_threads()
def guest_rows(plan: GuestRecording) -> list[Row]:
    folder = checkpoint_folder(guest_named(plan.model))
    written, name = text_of(plan.text)
    ids = Tokenizer(folder).encode(written)
    model = load_model(folder, top_k=plan.top_k)
    layout = model.config.layout(name=f"{plan.model}, top-k {plan.top_k}")
    prefix = prefilled(model, layout, ids[: plan.context + 1], name)
    with tempfile.TemporaryDirectory() as place:
        path = plan.record or Path(place) / "selections.trace"
        console.note(f"reading {plan.queries} tokens behind {plan.context:,} ...")
        record(path, prefix, ids, query_count=plan.queries, mtp=1)
        with TraceReader(path) as reader:
            return [prefix_row(prefix), *trace_rows(reader)]


def prefilled(model: Model, layout: ModelLayout, ids: Sequence[int], text: str) -> Prefix:
    """A prefix that was prefilled whole; the last of `ids` is the token after it."""
    length = len(ids) - 1
    console.note(f"context {length:,}: prefilling ...")
    return build_prefix(model, layout, ids, length=length, text=text, segment=length)


def trace_rows(reader: TraceReader) -> list[Row]:
    """Rows for a trace with one token a step; its first 32 queries only warm the arena."""
    header = reader.header
    if len(reader) <= WINDOW_MAX:
        raise BadInput(f"{len(reader)} steps are recorded, the first {WINDOW_MAX} only warm")
    groups = range(header.group_count)
    loads = [recorded(reader, group=group, lead_steps=WINDOW_MAX) for group in groups]
    config = {"ctx": header.context, "k": header.top_k, "steps": loads[0].step_count}
    rows = _similarity_rows(reader, loads, config)
    for multiple in MULTIPLES:
        rows += _policy_rows(loads, multiple, header.top_k, config)
    return [*rows, _warm_row(loads, header.top_k, config), _budget_row(loads, header.top_k, config)]


def _similarity_rows(
    reader: TraceReader, loads: list[Workload], config: dict[str, Any]
) -> list[Row]:
    within = [step_similarity(step.rows for step in load.steps()) for load in loads]
    between = [between_layers(reader, group) for group in range(1, len(loads))]
    named = ("token before (intra-layer)", within), ("layer before (inter-layer)", between)
    return [
        Row(
            name=f"similarity to the {what}",
            value=float(np.mean(values)),
            unit="of k",
            config=config | {"by_layer": listed(values, 2)},
        )
        for what, values in named
        if values
    ]


def _policy_rows(
    loads: list[Workload], multiple: float, top_k: int, config: dict[str, Any]
) -> list[Row]:
    slots, names = slots_of(multiple, top_k), [*JUDGED, "min"]
    misses = {name: [_misses(load, slots, top_k, name) for load in loads] for name in names}
    least = float(np.mean(misses["min"]))
    return [
        Row(
            name=f"misses per layer and step at {multiple:g} top-k, {name}",
            value=float(np.mean(counts)),
            unit="rows",
            baseline="MIN",
            baseline_value=least,
            ratio=least / float(np.mean(counts)) if np.mean(counts) else 1.0,
            config=config
            | {"slots": slots, "over_min": f"{np.mean(counts) / least:.2f}" if least else "-"}
            | ({"by_layer": listed(counts)} if name == "lru" else {}),
            samples=counts,
        )
        for name, counts in misses.items()
        if name != "min"
    ]


def _misses(load: Workload, slots: int, top_k: int, name: Any) -> float:
    policy: Policy = (
        Min(load, slots=slots, future=next_uses(load))
        if name == "min"
        else PlannerArena(load, slots=slots, top_k=top_k, evict=name)
    )
    return laboratory.run(load, {name: policy}, start=Start(warm=True))[name].mean()


def _warm_row(loads: list[Workload], top_k: int, config: dict[str, Any]) -> Row:
    """The first misses of a new request, in an arena warmed by 32 windows or empty."""
    slots = slots_of(WARMED_AT, top_k)
    warm, cold = (
        float(np.mean([_first(load, slots, top_k, start) for load in loads]))
        for start in (Start(warm=True), Start())
    )
    return Row(
        name="misses per layer in the first step, warmed",
        value=warm,
        unit="rows",
        baseline="not warmed",
        baseline_value=cold,
        ratio=cold / warm if warm else None,
        config=config | {"slots": slots},
    )


def _first(load: Workload, slots: int, top_k: int, start: Start) -> int:
    arena = PlannerArena(load, slots=slots, top_k=top_k)
    return laboratory.run(load, {"lru": arena}, start=start)["lru"].misses[0]


def _budget_row(loads: list[Workload], top_k: int, config: dict[str, Any]) -> Row:
    """Slots of each layer by equal marginal benefit, against the same number in all layers."""
    each = slots_of(WARMED_AT, top_k)
    curves = [miss_curve(load).exact for load in loads]
    slots = divide(curves, total_slots=each * len(curves), slots_min=top_k)
    even = float(np.mean([curve[each] for curve in curves]))
    ours = float(np.mean([curve[count] for curve, count in zip(curves, slots, strict=True)]))
    return Row(
        name="misses per layer and step, budgets by layer",
        value=ours,
        unit="rows",
        baseline="even budgets",
        baseline_value=even,
        ratio=even / ours if ours else None,
        config=config | {"slots": each, "by_layer": listed(slots)},
    )
