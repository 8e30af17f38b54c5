"""The measured half of the headline: decode steps of the embedded model, offload off and on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from ess import console
from ess.bench.engine.arms.decode_arm import DecodeArm, DecodeWay, DecodeWork
from ess.bench.engine.cpu_tables import Watched, calibrate
from ess.bench.engine.step import WHOLE, effective
from ess.bench.harness.measure.slow_lane import TimedLane
from ess.bench.harness.output.agreement import agreement
from ess.bench.harness.prefix import Prefix, embedded_prefix, prefix_row
from ess.bench.harness.report import Row, compare
from ess.bench.harness.threads import compute_threads
from ess.bench.headline.plan import HeadlineRun, Outcome
from ess.flashtrans.lanes import open_lane
from ess.kernels.backend import chosen
from ess.units import PAGE_ROWS

PREFIX_SHARE: Final = 0.4


@compute_threads()
def measure(
    outcome: Outcome, plan: HeadlineRun, folder: Path | None, text: Path | None, *, with_spans: bool
) -> None:
    until, is_begun = time.monotonic() + plan.seconds, False
    for context in plan.contexts:
        seconds = plan.seconds * PREFIX_SHARE
        prefix = embedded_prefix(context, text=text, folder=folder, seconds=seconds)
        outcome.rows.extend([configuration_row(prefix, plan), prefix_row(prefix)])
        for mtp in plan.mtps:
            for batch in plan.batches:
                if time.monotonic() > until and is_begun:
                    console.note(f"left out: context {context:,}, batch {batch}, mtp {mtp}: late")
                    continue
                console.note(f"context {context:,}, batch {batch}, mtp {mtp} ...")
                steps = plan.repetitions * plan.steps + 2
                shape = DecodeWork(context=context, batch=batch, mtp=mtp, steps=steps)
                outcome.rows.extend(measured_rows(prefix, shape, plan, until))
                is_begun = True
            if time.monotonic() < until:
                _check_tables(outcome, prefix, plan, mtp, with_spans=with_spans)


def configuration_row(prefix: Prefix, plan: HeadlineRun) -> Row:
    """The mode and ratios that were given, and the model and kernels that run."""
    layout, lane = prefix.layout, open_lane()
    asked = f"asked for mode {plan.mode}, ratio {', '.join(f'{ratio:g}' for ratio in plan.ratios)}"
    runs = (
        f"{layout.name}, {layout.layer_count} layers and MTP, rows of {layout.row_bytes} B "
        f"({layout.row.form}), top-k {layout.top_k}; {chosen('cpu')}; {type(lane).__name__}; "
        "both tiers are DRAM"
    )
    lane.close()
    return Row(
        name="configuration",
        value=torch.get_num_threads(),
        unit="compute threads",
        config={"how": f"{asked}; runs {runs}"},
    )


def measured_rows(prefix: Prefix, shape: DecodeWork, plan: HeadlineRun, until: float) -> list[Row]:
    ways = [
        WHOLE,
        *(
            DecodeWay(name=f"{plan.mode} {ratio:g}", mode=plan.mode, ratio=ratio)
            for ratio in plan.ratios
        ),
    ]
    lanes = [TimedLane() for _ in ways]
    arms = [DecodeArm(prefix, shape, way, lane=lane) for way, lane in zip(ways, lanes, strict=True)]
    try:
        waited_us = _turns(arms, lanes, shape.steps, plan.repetitions, until)
    finally:
        for arm in arms:
            arm.close()
    return [
        _measured_row(arm, arms[0], waited, plan)
        for arm, waited in zip(arms, waited_us, strict=True)
    ]


def _turns(
    arms: Sequence[DecodeArm], lanes: Sequence[TimedLane], steps: int, least: int, until: float
) -> list[list[float]]:
    """Steps all in turn; returns how long each step of each arm waited for its lane.

    It stops after the deadline, but never before `least` steps.
    """
    waited: list[list[float]] = [[] for _ in arms]
    for number in range(steps):
        if number >= 2 + least and time.monotonic() > until:
            break
        if number == 2:
            for arm, waits_us in zip(arms, waited, strict=True):
                arm.forget()
                waits_us.clear()
        for place in range(len(arms)):
            at = (number + place) % len(arms)
            lanes[at].take_jobs()
            arms[at].step()
            waited[at].append(sum(job.waited_us for job in lanes[at].take_jobs()))
    return waited


def _measured_row(
    arm: DecodeArm, whole: DecodeArm, waited_us: list[float], plan: HeadlineRun
) -> Row:
    """A repetition is the rate over some of the steps, by the mean tokens of all steps."""
    shape = arm.shape
    step_ms = statistics.median(arm.taken.seconds) * 1e3
    each, rates = float(np.mean(arm.taken.tokens)), repetition_rates(arm, plan.repetitions)
    config = {
        "half": "measured",
        **effective(arm),
        "step_ms": round(step_ms, 2),
        "exposed_ms": round(statistics.median(waited_us) / 1e3, 3),
        "per_user": round(statistics.median(rates) / shape.batch, 2),
        "accepted": round(each / shape.batch, 2),
    }
    if arm is not whole:
        counts = np.array(arm.taken.misses)[:, : arm.offload.layout.layer_count] / shape.batch
        p50, p95 = np.percentile(counts, [50, 95])
        config |= {"misses_p50": round(float(p50), 1), "misses_p95": round(float(p95), 1)}
    name = f"ess-embedded, {arm.way.name}"
    if arm is whole:
        return Row(
            name=name,
            value=statistics.median(rates),
            unit="tokens/s",
            config=config,
            samples=rates,
        )
    return compare(
        name=name,
        unit="tokens/s",
        ours=rates,
        baseline=(whole.way.name, repetition_rates(whole, plan.repetitions)),
        better="higher",
        config=config,
    )


def repetition_rates(arm: DecodeArm, repetitions: int) -> list[float]:
    each = float(np.mean(arm.taken.tokens))
    runs = np.array_split(np.array(arm.taken.seconds), repetitions)
    return [each / float(np.median(run)) for run in runs if run.size]


def _check_tables(
    outcome: Outcome, prefix: Prefix, plan: HeadlineRun, mtp: int, *, with_spans: bool
) -> None:
    """Predicts a step as the simulator does, on a machine where it can be measured."""
    context = prefix.length
    small = [max(4 * PAGE_ROWS, context // 8), max(8 * PAGE_ROWS, context // 2)]
    way = DecodeWay(name=plan.mode, mode="none", ratio=plan.ratios[0])
    console.note(f"operator tables of this CPU from contexts {small[0]:,} and {small[1]:,} ...")
    cpu = calibrate(prefix, contexts=small, batches=(1, 2), mtp=mtp, way=way)
    shape = DecodeWork(context=context, batch=plan.batches[0], mtp=mtp, steps=8)
    watched = Watched(prefix, shape, way)
    try:
        steps = [watched.step() for _ in range(7)]
    finally:
        watched.arm.close()
    seconds = statistics.median(watched.arm.taken.seconds[1:])
    predicted_ms = cpu.step_us(queries=shape.batch * mtp, context=context) / 1e3
    if with_spans:
        usual = sorted(steps[1:], key=lambda spans: max(span.end_us for span in spans))[
            len(steps) // 2
        ]
        outcome.timelines.append((f"measured: ess-embedded, {context:,} tokens", usual))
    outcome.rows.append(
        agreement(
            name="ess-embedded step, predicted from CPU tables",
            unit="ms",
            ours=predicted_ms,
            published=("measured", seconds * 1e3),
            config={
                "half": "check",
                "ctx": context,
                "batch": shape.batch,
                "mtp": mtp,
                "tables_from": " ".join(f"{length:,}" for length in small),
            },
        )
    )
