"""DA and DBA against NONE on a link slowed to a set rate: the hidden share and its prediction.

The embedded model, its selections widened to the 2,048 rows of a large model, decodes with every
row resident; then some selected rows are dropped before each layer is resolved, and the lane takes
as long as a link of the set rate would. Times are of whole steps:

    base       NONE at the lane's full speed, in the same minute, less what it waited
    added      (step - base) / layers: a layer's extra time over one that fetches nothing
    T          the time the link was busy, per layer
    hidden     1 - added / T

The policy's prediction comes from runs at full speed and the rate alone, never from a slowed step:
windows are the time from a fetch's submission to the first wait for it, costs are the extra time of
DA and DBA over NONE when nothing is slow (`ess.cost.exposed` has the formulas).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from ess import console, cost
from ess.bench.engine.arms.decode_arm import DecodeArm, DecodeWay, DecodeWork
from ess.bench.engine.arms.forced_misses import Forced
from ess.bench.harness.folders import default_folder
from ess.bench.harness.lists import amount, size, sizes
from ess.bench.harness.measure.slow_lane import Job, TimedLane
from ess.bench.harness.prefix import Prefix, check_memory, embedded_prefix
from ess.bench.harness.report import Row
from ess.bench.harness.threads import compute_threads
from ess.cost import Hiding
from ess.errors import BadInput
from ess.models.load import load_model

GBPS_MAX: Final = 1e4
MODES: Final = ("none", "da", "dba")
CROSSING: Final = 0.75
"""Without a given rate, T is this share of DA's window at the middle of the grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLinkRun:
    context: int
    batch: int
    mtp: int = 2
    misses: Sequence[int]
    steps: int
    top_k: int = 2048
    bytes_per_us: float | None = None


SMOKE: Final = SlowLinkRun(context=320, batch=2, misses=(16, 32), steps=2, top_k=128)


def slow_link_benchmark(
    *,
    ctx: str = "8k",
    batch: int = 4,
    mtp: int = 2,
    misses: str = "32,64,128,256,512",
    gbps: float | None = None,
    steps: int = 5,
    smoke: bool = False,
) -> list[Row]:
    """DA and DBA against NONE on a slowed link: whole steps, hidden share beside the predicted.

    Parameters
    ----------
    ctx
        Context length.
    batch
        Requests per step.
    mtp
        Tokens verified per step.
    misses
        Rows that every request misses in every layer, a list.
    gbps
        The link's rate in GB/s. By default one that puts the crossing inside the grid.
    steps
        Measured steps of each cell.
    """
    if smoke:
        return rows_of(SMOKE, folder=None)
    if gbps is not None and not 0 < gbps <= GBPS_MAX:
        raise BadInput(f"--gbps {gbps}: a link's rate is above 0, and at most {GBPS_MAX:g}")
    plan = SlowLinkRun(
        context=size("--ctx", ctx),
        batch=amount("--batch", batch),
        mtp=amount("--mtp", mtp),
        misses=sizes("--misses", misses),
        steps=amount("--steps", steps),
        bytes_per_us=None if gbps is None else gbps * 1e3,
    )
    check_memory(plan.context * plan.batch)
    return rows_of(plan, folder=default_folder())


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Medians over the steps of one mode at one miss count, per layer and in microseconds."""

    step_us: float
    busy_us: float
    waited_us: float
    window_us: float
    fetched: float


@compute_threads()
def rows_of(plan: SlowLinkRun, *, folder: Path | None) -> list[Row]:
    prefix = embedded_prefix(plan.context, folder=folder, model=load_model(top_k=plan.top_k))
    runs = [_Run(prefix, plan, mode) for mode in MODES]
    try:
        rate = plan.bytes_per_us or _crossing_rate(runs, plan, prefix.layout.row_bytes)
        console.note(f"a link of {rate / 1e3:.3f} GB/s")
        cells = {miss: measured(runs, plan, miss, rate) for miss in plan.misses}
    finally:
        for run in runs:
            run.arm.close()
    rows = [row for miss, both in cells.items() for row in _rows(miss, rate, *both)]
    return [*rows, agreement_row(list(cells.values()))]


class Step(NamedTuple):
    """One step: microseconds, the jobs given to the lane, and the rows missed."""

    us: float
    jobs: list[Job]
    missed: int


class _Run:
    """One mode's engine, whose misses and link can be set between steps."""

    def __init__(self, prefix: Prefix, plan: SlowLinkRun, mode: str) -> None:
        cells = 2 * (len(plan.misses) + 1) * (plan.steps + 1)
        shape = DecodeWork(context=plan.context, batch=plan.batch, mtp=plan.mtp, steps=cells)
        self.mode = mode
        self.layers = prefix.layout.layer_total
        self.lane = TimedLane()
        way = DecodeWay(name=mode, mode=mode, ratio=1.0)
        self.forced = Forced()
        self.arm = DecodeArm(prefix, shape, way, lane=self.lane, placement=self.forced.over)
        self.offload = self.arm.offload

    def step(self) -> Step:
        self.offload.drain()
        self.lane.take_jobs()
        self.arm.step()
        missed = int(self.arm.taken.misses[-1].sum())
        return Step(self.arm.taken.seconds[-1] * 1e6, self.lane.take_jobs(), missed)


def measured(
    runs: Sequence[_Run], plan: SlowLinkRun, miss: int, rate: float | None
) -> tuple[dict[str, Cell], dict[str, Cell]]:
    """Runs every mode at full speed and slowed, step by step in turn, so that other work on the
    machine affects all alike; drops the first round."""
    for run in runs:
        run.offload.drain()
        run.forced.miss_count = miss
    turns = [(run, pace) for run in runs for pace in (None, rate)]
    steps_of: dict[tuple[str, float | None], list[Step]] = {}
    for number in range(plan.steps + 1):
        for place in range(len(turns)):
            run, pace = turns[(number + place) % len(turns)]
            run.lane.pace(pace)
            step = run.step()
            if number:
                steps_of.setdefault((run.mode, pace), []).append(step)
    cells = {
        key: _cell(steps, runs[0].layers, plan.batch, parts=2 if key[0] == "dba" else 1)
        for key, steps in steps_of.items()
    }
    fast, slow = ({mode: cells[mode, pace] for mode in MODES} for pace in (None, rate))
    return fast, slow


def _cell(steps: list[Step], layers: int, batch: int, *, parts: int) -> Cell:
    """Jobs without a wait are stores, after everything else. The window of a layer in two parts is
    that of its first part, whose fetch the second part's indexer hides."""
    fetches = [[job for job in jobs if job.waits_ns] for _, jobs, _ in steps]

    def median(values: list[float]) -> float:
        return statistics.median(values) / layers

    windows = [job.window_us for jobs in fetches for job in jobs[::parts] if job.window_us]
    return Cell(
        step_us=median([us for us, _, _ in steps]),
        busy_us=median([sum(job.busy_us for job in jobs) for jobs in fetches]),
        waited_us=median([sum(job.waited_us for job in jobs) for jobs in fetches]),
        window_us=statistics.median(windows) if windows else 0.0,
        fetched=median([missed / batch for _, _, missed in steps]),
    )


def _crossing_rate(runs: Sequence[_Run], plan: SlowLinkRun, row_bytes: int) -> float:
    middle = sorted(plan.misses)[len(plan.misses) // 2]
    fast, _ = measured(runs, plan, middle, None)
    return crossing_rate(fast["da"], plan.batch * row_bytes)


def crossing_rate(da: Cell, bytes_each: int) -> float:
    """Bytes per microsecond at which these misses take `CROSSING` of DA's window."""
    return da.fetched * bytes_each / (CROSSING * da.window_us)


def hiding(fast: dict[str, Cell]) -> Hiding:
    """Windows and costs from runs at full speed, which is all that the policy knows."""
    none, da, dba = (fast[mode] for mode in MODES)
    base_us = none.step_us - none.waited_us
    da_cost_us = max(0.0, da.step_us - da.waited_us - base_us)
    return Hiding(
        window_us=max(0.0, da.window_us - da_cost_us),
        index_us=2 * max(0.0, dba.window_us - da.window_us),
        da_cost_us=da_cost_us,
        dba_cost_us=max(0.0, dba.step_us - dba.waited_us - base_us),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The share of the transfer that was hidden, and the share that the policy predicted.

    Below 0 the schedule cost more than it hid.
    """

    measured: float
    predicted: float
    added_us: float


def shares_of(mode: str, fast: dict[str, Cell], slow: dict[str, Cell]) -> Shares:
    base_us = fast["none"].step_us - fast["none"].waited_us
    moved_us = slow[mode].busy_us
    predicted_us = getattr(cost.exposed(moved_us, hiding(fast)), mode)
    added_us = slow[mode].step_us - base_us
    return Shares(
        measured=1 - added_us / moved_us,
        predicted=1 - predicted_us / moved_us,
        added_us=added_us,
    )


def _rows(miss: int, rate: float, fast: dict[str, Cell], slow: dict[str, Cell]) -> list[Row]:
    rows = []
    for mode in MODES:
        cell, shares = slow[mode], shares_of(mode, fast, slow)
        config = {
            "misses": f"{cell.fetched:.0f} of {miss}" if cell.fetched < miss - 1 else miss,
            "T_us": round(cell.busy_us),
            "added_us": round(shares.added_us),
            "waited_us": round(cell.waited_us),
            "window_us": round(fast[mode].window_us),
            "hidden": f"{shares.measured:.0%}",
            "predicted": f"{shares.predicted:.0%}",
            "GB_per_s": round(rate / 1e3, 3),
        }
        rows.append(_cell_row(miss, mode, slow, config))
    return rows


def agreement_row(cells: Sequence[tuple[dict[str, Cell], dict[str, Cell]]]) -> Row:
    """Compares DA and DBA at every miss count; the added time is the cost of a wrong choice."""
    both_shares = [shares_of(mode, *both) for both in cells for mode in ("da", "dba")]
    points = [100 * abs(shares.measured - shares.predicted) for shares in both_shares]
    return Row(
        name="hidden share, measured against predicted",
        value=statistics.fmean(points),
        unit="points apart",
        config={"cells": len(points)},
        samples=points,
    )


def _cell_row(miss: int, mode: str, slow: dict[str, Cell], config: dict[str, Any]) -> Row:
    mine, none = slow[mode].step_us, slow["none"].step_us
    return Row(
        name=f"step at {miss} misses, {mode.upper()}",
        value=mine,
        unit="us/layer",
        baseline=None if mode == "none" else "NONE",
        baseline_value=None if mode == "none" else none,
        ratio=None if mode == "none" else none / mine,
        config=config,
    )
