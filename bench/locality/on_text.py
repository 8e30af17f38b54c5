"""How local the selections of real text are, layer by layer.

Similarities by the paper's formulas, misses by ratio of slots to context under the product's own
planner and under Belady's MIN, warm-up on and off, and accepted drafts of MTP.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from ess import console
from ess.bench.engine.arms.decode_arm import DecodeArm, DecodeWay, DecodeWork
from ess.bench.harness.folders import default_folder
from ess.bench.harness.lists import amount, shares, size
from ess.bench.harness.output import plots
from ess.bench.harness.prefix import DISTINCT, SEGMENT, Prefix, embedded_prefix, prefix_row
from ess.bench.harness.report import Row
from ess.bench.harness.text import token_ids
from ess.bench.harness.threads import compute_threads
from ess.bench.locality.analysis import EARLY_STEPS, Locality, analyse, listed, slots_for
from ess.bench.locality.guest_text import GuestRecording, guest_rows
from ess.bench.locality.record_trace import record
from ess.bench.prediction.sim_vs_engine import least_slots, twin_row
from ess.pool.lru.arena import BLOCK_SLOTS
from ess.trace import TraceReader

TWIN_RATIO_MAX: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRecording:
    context: int
    mtp: int = 2
    queries: int
    ratios: tuple[float, ...]
    segment: int = SEGMENT
    steps: int = 24


SMOKE: Final = TextRecording(context=704, queries=64, ratios=(0.5,), segment=704, steps=4)


def locality_benchmark(
    *,
    ctx: str = "4k",
    mtp: int = 2,
    ratio: str = "0.1,0.2,0.3,0.5,0.7",
    queries: int = 512,
    text: Path | None = None,
    record: Path | None = None,
    plot: Path | None = None,
    model: str | None = None,
    top_k: int = 256,
    smoke: bool = False,
) -> list[Row]:
    """Locality of the embedded model's selections on real text, or of a guest's.

    Parameters
    ----------
    model
        A guest, such as smollm2: under every policy, in pools of 1.5 to 4 top-k.
    top_k
        How many rows a guest's queries select.
    ctx
        Context length; up to 4k it is prefilled whole.
    mtp
        Tokens verified per step.
    ratio
        Slots over context, a list.
    queries
        Tokens read behind the context.
    text
        Read this text; by default Python's own reference.
    record
        Keep the recorded selections in this file.
    plot
        Draw the plots into this folder.
    """
    console.check_file("--record", record)
    for option, value in (("--queries", queries), ("--mtp", mtp), ("--top-k", top_k)):
        amount(option, value)
    plots.check_folder(plot)
    if model:
        context = size("--ctx", ctx)
        asked = GuestRecording(model=model, context=context, queries=queries, top_k=top_k)
        return guest_rows(replace(asked, text=text, record=record))
    if smoke:
        return rows_of(SMOKE, folder=None, record_to=record, plot=plot)
    ratios = tuple(shares("--ratio", ratio))
    plan = TextRecording(context=size("--ctx", ctx), mtp=mtp, queries=queries, ratios=ratios)
    return rows_of(plan, folder=default_folder(), text=text, record_to=record, plot=plot)


@compute_threads()
def rows_of(
    plan: TextRecording,
    *,
    folder: Path | None,
    text: Path | None = None,
    record_to: Path | None = None,
    plot: Path | None = None,
) -> list[Row]:
    prefix = embedded_prefix(
        plan.context,
        text=text,
        folder=folder,
        segment=plan.segment,
        distinct=max(DISTINCT, plan.context),
    )
    locality = observe(prefix, token_ids(text)[0], plan, record_to)
    if plot is not None:
        plots.draw_locality(locality, plot)
    return [
        prefix_row(prefix),
        *similarity_rows(locality),
        *ratio_rows(locality),
        *warm_rows(locality),
        *twin_rows(prefix, plan),
        *acceptance_rows(prefix, plan),
    ]


def observe(
    prefix: Prefix, ids: list[int], plan: TextRecording, record_to: Path | None
) -> Locality:
    with tempfile.TemporaryDirectory() as place:
        path = record_to or Path(place) / "selections.trace"
        console.note(f"reading {plan.queries} tokens behind {plan.context:,} ...")
        record(path, prefix, ids, query_count=plan.queries, mtp=plan.mtp)
        with TraceReader(path) as reader:
            return analyse(reader, context=plan.context, ratios=list(plan.ratios))


def _config(locality: Locality, **more: Any) -> dict[str, Any]:
    return {"ctx": locality.context, "mtp": locality.mtp, "k": locality.top_k, **more}


def similarity_rows(locality: Locality) -> list[Row]:
    return [
        Row(
            name=name,
            value=float(np.mean(values)),
            unit="of k",
            config=_config(locality, by_layer=listed(values, 2)),
            samples=values,
        )
        for name, values in (
            ("similarity to the token before (intra-layer)", locality.within),
            ("similarity to the layer before (inter-layer)", locality.between),
        )
    ]


def ratio_rows(locality: Locality) -> list[Row]:
    rows = []
    for ratio, lru, least in zip(locality.ratios, locality.lru, locality.least, strict=True):
        mean, best = float(np.mean(lru)), float(np.mean(least))
        rows.append(
            Row(
                name=f"misses per layer and step at ratio {ratio:g}, LRU",
                value=mean,
                unit="rows",
                baseline="MIN",
                baseline_value=best,
                ratio=best / mean if mean else 1.0,
                config=_config(
                    locality,
                    slots=slots_for(ratio, locality.context),
                    hits=f"{1 - mean / (locality.mtp * locality.top_k):.1%}",
                    by_layer=listed(lru, 0),
                ),
                samples=lru,
            )
        )
    return rows


def warm_rows(locality: Locality) -> list[Row]:
    """Misses of a new request at ratio 0.2, in an arena warmed by 32 windows or empty."""
    rows = []
    for count in (1, EARLY_STEPS):
        warm, cold = float(np.mean(locality.warm[:count])), float(np.mean(locality.cold[:count]))
        what = "the first step" if count == 1 else f"the first {len(locality.warm)} steps"
        rows.append(
            Row(
                name=f"misses per layer in {what}, warmed",
                value=warm,
                unit="rows",
                baseline="not warmed",
                baseline_value=cold,
                ratio=cold / warm if warm else None,
                config=_config(locality, ratio=0.2),
                samples=locality.warm[:count],
            )
        )
    return rows


def twin_rows(prefix: Prefix, plan: TextRecording) -> list[Row]:
    """At ratio 0.2, or the least that holds a step's selection; no row for a short context."""
    least = (least_slots(prefix.layout, plan.mtp) + BLOCK_SLOTS) / plan.context
    if least > TWIN_RATIO_MAX:
        return []
    ratio = max(0.2, least)
    return [twin_row(prefix, ratio=ratio, mtp=plan.mtp, steps=plan.steps)]


def acceptance_rows(prefix: Prefix, plan: TextRecording) -> list[Row]:
    """On the model's own text, greedy and drawn: greedy text repeats itself and flatters drafts."""
    rows = []
    for name, temperature in (("greedy", 0.0), ("drawn at temperature 1", 1.0)):
        shape = DecodeWork(
            context=plan.context, batch=1, mtp=plan.mtp, steps=plan.steps, temperature=temperature
        )
        arm = DecodeArm(prefix, shape, DecodeWay(name=name, mode="none", ratio=0.5))
        for _ in range(plan.steps):
            arm.step()
        arm.close()
        each = float(np.mean(arm.taken.tokens))
        rows.append(
            Row(
                name=f"tokens accepted per step, {name}",
                value=each,
                unit="tokens",
                config={"ctx": plan.context, "mtp": plan.mtp, "steps": plan.steps},
                samples=[float(count) for count in arm.taken.tokens],
            )
        )
    return rows
