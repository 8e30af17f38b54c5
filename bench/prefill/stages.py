"""A real pipeline, and the same pipeline on a virtual clock with its stages' times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ess import console
from ess.bench.harness.output.agreement import agreement
from ess.bench.harness.report import Row, compare
from ess.bench.prefill.rig import ends_of, layers_of, measured, plan_of, sharing, stage_s, text
from ess.prefill.trial.pipe import Kind, Pipe, TrialTimes, kind_for
from ess.sim.prefill.measured import modelled
from ess.sim.prefill.pipeline import prefill
from ess.sim.prefill.stage_clock import ClockedChunks
from ess.sim.prefill.tuning import Layers, on_clock
from ess.units import counted

TOLERANCE: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesArm:
    """Rounds of a prompt of one length through a number of stages."""

    layers: Layers
    kind: Kind
    rans: tuple[TrialTimes, ...]

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def chunk_count(self) -> int:
        return len(self.rans[0].chunks)

    def on_clock(self) -> list[ClockedChunks]:
        return [on_clock(stage_s(ran, self.kind)) for ran in self.rans]

    def busy_s(self) -> list[float]:
        """Seconds of all stages together, in each round."""
        return [sum(map(sum, stage_s(ran, self.kind))) for ran in self.rans]

    @property
    def chunk_ms(self) -> list[float]:
        """Milliseconds of each stage, in the median over rounds and chunks."""
        rows = [times for ran in self.rans for times in stage_s(ran, self.kind)]
        return [1e3 * statistics.median(column) for column in zip(*rows, strict=True)]


def arm_of(stages: int, context: int, chunk: int, *, kind: Kind, rounds: int) -> StagesArm:
    console.note(f"  {counted(stages, 'stage')}, {context:,} tokens in chunks of {chunk} ...")
    layers = layers_of(stages)
    with Pipe(plan_of(layers, context)) as pipe:
        pipe.run([text(chunk + 1)], [chunk])
        rans = [
            pipe.run([text(context, number=number)], ends_of(context, chunk))
            for number in range(rounds)
        ]
    return StagesArm(layers=layers, kind=kind, rans=tuple(rans))


def stage_rows(arms: Sequence[StagesArm], context: int, chunk: int) -> list[Row]:
    """The first arm is the baseline of the others; with one stage it is the model in one piece."""
    first = arms[0]
    rows = []
    for arm in arms:
        rows += [_wall(arm, first, context, chunk), _stage_times(arm)]
        if arm.stages > 1:
            rows += _clock_rows(arm, first)
    return rows


def _wall(arm: StagesArm, first: StagesArm, context: int, chunk: int) -> Row:
    return compare(
        name=f"PP{arm.stages}, {context:,} tokens, wall clock",
        unit="s",
        ours=[ran.span_s for ran in arm.rans],
        baseline=(f"PP{first.stages}", [ran.span_s for ran in first.rans]),
        config={
            "cores": sharing(arm.stages),
            "chunk": chunk,
            "layers": ",".join(str(stop - start) for start, stop in arm.layers),
        },
    )


def _stage_times(arm: StagesArm) -> Row:
    times = arm.chunk_ms
    return Row(
        name=f"PP{arm.stages}, busiest stage, a chunk",
        value=max(times),
        unit="ms",
        config={
            "times": "on a core" if arm.kind == "core" else "wall clock",
            "stages_ms": ",".join(f"{each:.1f}" for each in times),
        },
    )


def _clock_rows(arm: StagesArm, first: StagesArm) -> list[Row]:
    stages, chunks = arm.stages, arm.chunk_count
    clocks, name = arm.on_clock(), f"PP{arm.stages} on the virtual clock"
    ideal = (stages - 1) / (stages - 1 + chunks)
    shown = {"chunks": chunks, "times": arm.kind, "links": "take no time"}
    rows = [
        compare(
            name=f"{name}, bubble share",
            unit="",
            ours=[clock.bubble_share for clock in clocks],
            baseline=("(P - 1) / (P - 1 + M)", [ideal]),
            config=shown,
        ),
        compare(
            name=f"{name}, efficiency",
            unit="",
            ours=[clock.efficiency for clock in clocks],
            baseline=("M / (P - 1 + M)", [1 - ideal]),
            better="higher",
            config=shown,
        ),
        compare(
            name=f"{name}, first token",
            unit="s",
            ours=[clock.span_s for clock in clocks],
            baseline=(f"PP{first.stages}, busy", first.busy_s()),
            config={**shown, "first_arm_times": first.kind},
        ),
    ]
    return [*rows, *_predictions(arm, name)]


def _predictions(arm: StagesArm, name: str) -> list[Row]:
    """Fits the times of every other round, and predicts the rounds between."""
    known, held_out = arm.rans[::2], arm.rans[1::2] or arm.rans
    fitted = modelled(measured(known, arm.kind))
    clock, chunks = on_clock(_middle(held_out, arm.kind)), held_out[0].chunks
    predicted = prefill(fitted.time, fitted.pipeline(arm.layers), [chunk.count for chunk in chunks])
    busy_s = sum(fitted.seconds(chunk.done, chunk.count) for chunk in chunks)
    config = {
        "fitted_to": f"{len(known)} rounds",
        "predicted": f"{len(held_out)} rounds",
        "fit_error": f"{fitted.error:.1%}",
        "growth": "none seen" if fitted.is_flat else "quadratic",
    }
    pairs = (
        ("first token", "s", clock.span_s, predicted.ttft_s),
        ("efficiency", "", clock.efficiency, busy_s / (arm.stages * predicted.ttft_s)),
    )
    return [
        agreement(
            name=f"{name}, {what}, predicted",
            unit=unit,
            ours=ours,
            published=("measured stage times", theirs),
            tolerance=TOLERANCE,
            config=config,
        )
        for what, unit, theirs, ours in pairs
    ]


def _middle(rans: Sequence[TrialTimes], kind: Kind) -> list[list[float]]:
    """The median over rounds for each chunk in each stage. A clock with the times of one round
    waits for the slowest stage of that round: noise does not cancel out there."""
    rounds = np.array([stage_s(ran, kind) for ran in rans])
    middle: list[list[float]] = np.median(rounds, axis=0).tolist()
    return middle


def arms_of(
    stage_counts: Sequence[int], context: int, chunk: int, *, rounds: int
) -> list[StagesArm]:
    """Arms with the same kind of time, so that they can be compared."""
    kind = kind_for(max(stage_counts))
    return [arm_of(count, context, chunk, kind=kind, rounds=rounds) for count in stage_counts]
