"""Decode steps of the embedded model in one run, all ways in turn: the cost of residency.

On a CPU both tiers are DRAM. So this does not show the gain of offload, a larger batch in the same
device memory; it shows its cost: planning, copying and two partials, beside an engine of the same
model and kernels that keeps every row where attention reads it
(`ess.bench.engine.arms.resident_baseline`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from ess import console
from ess.bench.engine.arms.decode_arm import DecodeArm, DecodeWay, DecodeWork, slots_each
from ess.bench.engine.arrivals import ArrivingPrompts
from ess.bench.engine.arrivals import rows_of as arrival_rows
from ess.bench.engine.cpu_tables import stage_medians
from ess.bench.harness.folders import default_folder
from ess.bench.harness.lists import amount, modes, policies, shares, sizes
from ess.bench.harness.prefix import (
    DISTINCT,
    SEGMENT,
    Prefix,
    check_memory,
    embedded_prefix,
    prefix_row,
)
from ess.bench.harness.report import Row, compare
from ess.bench.harness.threads import compute_threads
from ess.engine.devices import CPU, is_device, ordinal_of
from ess.errors import BadInput, Unavailable
from ess.kernels.cuda import driver
from ess.models.load import load_model
from ess.models.model import Model
from ess.overlap.policy import Mode
from ess.pool.lru.eviction import PolicyName
from ess.units import PAGE_ROWS, div_ceil

WHOLE: Final = DecodeWay(name="no offload", mode="resident", ratio=None)
RESIDENT: Final = DecodeWay(name="RESIDENT", mode="resident", ratio=1.0)
TARGET_RESIDENT: Final = 0.99
TARGET_OFFLOAD: Final = 0.95
WARM_UP_STEPS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRuns:
    """What one run of the command measures."""

    contexts: Sequence[int]
    batches: Sequence[int]
    mtps: Sequence[int] = (2,)
    ratios: Sequence[float] = (0.2,)
    modes: Sequence[str] = ("layerwise",)
    policies: Sequence[PolicyName] = ("lru",)
    stages: bool = False
    steps: int
    segment: int = SEGMENT
    distinct: int = DISTINCT
    targets: bool = True
    device: str = CPU


SMOKE: Final = StepRuns(
    contexts=(512,), batches=(2,), steps=6, segment=512, distinct=512, targets=False
)

SMALLER: Final[Mapping[bool, Mapping[str, Any]]] = {
    False: {},
    True: {"batches": (1,), "mtps": (1,), "ratios": (0.5,), "modes": ("da",), "steps": 2},
}
MODES: Final = {False: "layerwise", True: "none,da,dba"}


def step_benchmark(
    *,
    ctx: str = "4k",
    batch: str = "1,4",
    mtp: str = "2",
    ratio: str = "0.2",
    mode: str | None = None,
    evict: str = "lru",
    steps: int = 24,
    text: Path | None = None,
    snapshots: Path | None = None,
    stages: bool = False,
    arrivals: int | None = None,
    device: str = CPU,
    smoke: bool = False,
) -> list[Row]:
    """Decode steps of the embedded model: offload against everything resident.

    Parameters
    ----------
    ctx
        Contexts: 4k,16k or a range such as 4k-32k*2.
    batch
        Requests per step, a list or a range.
    mtp
        Tokens verified per step, a list or a range.
    ratio
        Slots over context, a list.
    mode
        How layers fetch: layerwise, none, da or dba, a list. By default layerwise; on a device all.
    evict
        Which rows give way: lru, sieve or score, a list.
    steps
        Measured steps of each way.
    text
        Decode behind this text; by default Python's own reference.
    snapshots
        Where prefilled segments are kept, by default in the user's folder for such files.
    stages
        Also print where the time of a median step goes.
    arrivals
        Print instead how long this many prompts of 64 tokens that come at once wait for a token.
    device
        Where steps run: cpu, cuda or cuda:N. On a device all ways stand beside RESIDENT.
    """
    if is_device(device) and (stages or arrivals is not None):
        raise BadInput(f"--device {device}: stages and arrivals are measured on the CPU only")
    if arrivals is not None:
        wanted = amount("--arrivals", arrivals)
        return arrival_rows(ArrivingPrompts(requests=min(wanted, 8) if smoke else wanted))
    if smoke:
        return rows_of(replace(SMOKE, device=device, **SMALLER[is_device(device)]), folder=None)
    plan = StepRuns(
        contexts=sizes("--ctx", ctx),
        batches=sizes("--batch", batch),
        mtps=sizes("--mtp", mtp),
        ratios=shares("--ratio", ratio),
        modes=modes("--mode", mode or MODES[is_device(device)]),
        policies=policies("--evict", evict),
        steps=amount("--steps", steps),
        stages=stages,
        device=device,
    )
    check_memory(max(plan.contexts) * max(plan.batches))
    return rows_of(plan, folder=snapshots or default_folder(), text=text)


@compute_threads()
def rows_of(plan: StepRuns, *, folder: Path | None, text: Path | None = None) -> list[Row]:
    model = None if plan.device == CPU else model_on(plan.device)
    if model is None:
        console.note(
            "both tiers of a CPU are DRAM: this measures what offload costs, not what it gains"
        )
    rows: list[Row] = []
    for context in plan.contexts:
        prefix = embedded_prefix(
            context, text=text, folder=folder, segment=plan.segment, distinct=plan.distinct
        )
        rows.append(prefix_row(prefix))
        for mtp in plan.mtps:
            for batch in plan.batches:
                shape = DecodeWork(
                    context=context, batch=batch, mtp=mtp, steps=plan.steps + WARM_UP_STEPS
                )
                console.note(f"context {context:,}, batch {batch}, mtp {mtp} ...")
                rows += _shape_rows(prefix, shape, plan, model)
                if plan.stages:
                    rows += [stage_row(prefix, shape, way) for way in ways(plan)]
    return rows


def ways(plan: StepRuns) -> list[DecodeWay]:
    offloaded = [
        DecodeWay(name=named(mode, ratio, evict), mode=mode, ratio=ratio, evict=evict)
        for ratio in plan.ratios
        for mode in plan.modes
        for evict in plan.policies
    ]
    return [RESIDENT, *offloaded] if is_device(plan.device) else [WHOLE, RESIDENT, *offloaded]


def named(mode: str, ratio: float, evict: PolicyName) -> str:
    return f"{mode.upper()} at {ratio:g}" + ("" if evict == "lru" else f", {evict}")


def model_on(device: str) -> Model:
    """The embedded model as a server would have it on this device."""
    missing = driver.why_missing()
    if missing is not None:
        raise Unavailable(f"nothing is measured on {device}: {missing}")
    return load_model(form="stored", device=f"cuda:{ordinal_of(device)}")


def _shape_rows(
    prefix: Prefix, shape: DecodeWork, plan: StepRuns, model: Model | None
) -> list[Row]:
    arms = [DecodeArm(prefix, shape, way, model=model) for way in ways(plan)]
    try:
        take_turns(arms, shape.steps)
        first = arms[:1] if model is not None else []
        shown = [row for arm in arms[1:] for row in arm_rows(arm, arms[0], targets=plan.targets)]
        return [*map(device_row, first), *shown]
    finally:
        for arm in arms:
            arm.close()


def stage_row(prefix: Prefix, shape: DecodeWork, way: DecodeWay) -> Row:
    """The time of each stage. The sum of medians is close to a step, not equal; ways run alone."""
    medians = stage_medians(prefix, shape, way, shape.steps - 1)
    return Row(
        name=f"stages of a step, {way.name}",
        value=sum(medians.values()),
        unit="us",
        config={
            "ctx": shape.context,
            "batch": shape.batch,
            "mtp": shape.mtp,
            **{stage.replace(" ", "_"): round(us) for stage, us in sorted(medians.items())},
        },
    )


def take_turns(arms: Sequence[DecodeArm], steps: int) -> None:
    """Steps all arms in turn, every round in another order: an arm that always followed the same
    other arm would always meet that arm's stores. The first rounds do not count."""
    order = np.random.default_rng(0)
    for number in range(steps):
        if number == WARM_UP_STEPS:
            for arm in arms:
                arm.forget()
        for place in order.permutation(len(arms)):
            arms[place].step()


def arm_rows(arm: DecodeArm, whole: DecodeArm, *, targets: bool) -> list[Row]:
    target = TARGET_RESIDENT if arm.way.mode == "resident" else TARGET_OFFLOAD
    config = effective(arm)
    same = sum(a == b for a, b in zip(arm.outputs, whole.outputs, strict=True))
    rate = compare(
        name=f"decode, {arm.way.name}",
        unit="tokens/s",
        ours=_rates(arm),
        baseline=(whole.way.name, _rates(whole)),
        better="higher",
        target=target if targets else None,
        config=config | {"same_text": f"{same}/{len(arm.outputs)}"},
    )
    rows = [rate, acceptance_row(arm, config)]
    return rows if arm.way.mode == "resident" else [*rows, *miss_rows(arm, config)]


def device_row(arm: DecodeArm) -> Row:
    """The baseline of the ways on a device."""
    samples = [1e3 * seconds for seconds in arm.taken.seconds]
    name = f"a step, {arm.way.name}"
    return Row(
        name=name,
        value=float(np.median(samples)),
        unit="ms",
        config=effective(arm),
        samples=samples,
    )


def _rates(arm: DecodeArm) -> list[float]:
    """Tokens of a mean step over the time of each step, so that only the clock adds noise."""
    each = float(np.mean(arm.taken.tokens))
    return [each / seconds for seconds in arm.taken.seconds]


def effective(arm: DecodeArm) -> dict[str, Any]:
    """The given shape, and the slots that the pools gave each request."""
    shape, way = arm.shape, arm.way
    config: dict[str, Any] = {"ctx": shape.context, "batch": shape.batch, "mtp": shape.mtp}
    if way.mode != "resident" and way.ratio is not None:
        wanted = slots_each(shape, way.ratio) * shape.batch
        asked = round(div_ceil(wanted, PAGE_ROWS) * PAGE_ROWS / shape.batch)
        held = round(float(arm.offload.stats().slot_count.mean()) / shape.batch)
        config |= {"slots_each": held} if held == asked else {"slots_each": f"{held} of {asked}"}
    return config | (_device_config(arm) if arm.engine.runner.model.device.type != CPU else {})


def _device_config(arm: DecodeArm) -> dict[str, Any]:
    """The device, and how often layers ran in each mode."""
    counts = arm.engine.tuning.mode_counts.sum(axis=0).tolist()
    ran = {mode.name: count for mode, count in zip(Mode, counts, strict=True) if count}
    name = driver.Device(arm.engine.runner.model.device.index or 0).name
    return {"kind": "measured", "device": name, "layers_ran": ran}


def acceptance_row(arm: DecodeArm, config: dict[str, Any]) -> Row:
    each = float(np.mean(arm.taken.tokens)) / arm.shape.batch
    drafts = arm.shape.mtp - 1
    accepted = f"{(each - 1) / drafts:.0%}" if drafts else "no drafts"
    return Row(
        name=f"tokens per request and step, {arm.way.name}",
        value=each,
        unit="tokens",
        config=config | {"drafts_accepted": accepted},
    )


def miss_rows(arm: DecodeArm, config: dict[str, Any]) -> list[Row]:
    """Misses per request, layer and step; the MTP layer apart, as its misses only cost drafts."""
    missed = np.array(arm.taken.misses) / arm.shape.batch
    layers = arm.offload.layout.layer_count
    rows = []
    for name, counts in (("layer", missed[:, :layers]), ("MTP layer", missed[:, layers:])):
        if counts.size:
            rows.append(
                _miss_row(f"misses per request, {name} and step, {arm.way.name}", counts, config)
            )
    return rows


def _miss_row(
    name: str, counts: np.ndarray[Any, np.dtype[np.float64]], config: dict[str, Any]
) -> Row:
    p50, p95 = np.percentile(counts, [50, 95])
    by_layer = " ".join(f"{mean:.0f}" for mean in counts.mean(axis=0))
    return Row(
        name=name,
        value=float(p50),
        unit="rows",
        config=config | {"p95": round(float(p95), 1), "mean_by_layer": by_layer},
        samples=[float(mean) for mean in counts.mean(axis=1)],
    )
