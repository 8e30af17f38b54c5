"""Predicted and measured steps of the embedded model over batches, contexts, ratios and drafts.

For every number of drafts and every ratio the stages are timed once at small contexts and batches;
every other step is predicted from these tables and then measured.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import product
from typing import Final

from ess import console
from ess.bench.engine.cpu_tables import CpuTables, Watched, calibrate
from ess.bench.engine.decode_arm import Shape, Way
from ess.bench.harness.agreement import agreement
from ess.bench.harness.folders import default_folder
from ess.bench.harness.lists import shares, sizes
from ess.bench.harness.prefix import SEGMENT, Prefix, embedded_prefix
from ess.bench.harness.report import Row
from ess.bench.harness.threads import compute_threads
from ess.units import PAGE_ROWS

MEDIAN_MAX: Final = 0.05
LARGEST_MAX: Final = 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    contexts: list[int]
    batches: list[int]
    ratios: list[float]
    drafts: list[int]
    steps: int = 7


SMOKE: Final = Grid(contexts=[704], batches=[1], ratios=[0.5], drafts=[2], steps=2)


def own_grid_benchmark(
    *,
    ctx: str = "2k,4k,16k",
    batch: str = "1,2,4,8,16",
    ratio: str = "0.2,0.3,0.5",
    mtp: str = "1,2,4",
    steps: int = 7,
    smoke: bool = False,
) -> list[Row]:
    """Steps of the embedded model: predicted from this CPU's tables, and measured.

    Parameters
    ----------
    ctx
        Context lengths, a list.
    batch
        Requests that decode together, a list.
    ratio
        Slots over context, a list.
    mtp
        Tokens verified per step, a list.
    steps
        Steps of each measurement; the first does not count.
    """
    asked = Grid(
        contexts=sizes("--ctx", ctx),
        batches=sizes("--batch", batch),
        ratios=list(shares("--ratio", ratio)),
        drafts=sizes("--mtp", mtp),
        steps=steps,
    )
    return rows_of(SMOKE if smoke else asked, with_folder=not smoke)


@compute_threads()
def rows_of(grid: Grid, *, with_folder: bool) -> list[Row]:
    rows: list[Row] = []
    folder = default_folder() if with_folder else None
    for context in grid.contexts:
        prefix = embedded_prefix(context, folder=folder, segment=min(SEGMENT, context))
        for mtp, ratio in product(grid.drafts, grid.ratios):
            console.note(f"{context:,} tokens, {mtp} a step, ratio {ratio:g} ...")
            rows += _rows(prefix, grid, mtp, Way(name="none", mode="none", ratio=ratio))
    return [*rows, *_summary(rows)]


def _rows(prefix: Prefix, grid: Grid, mtp: int, way: Way) -> list[Row]:
    longest = prefix.length
    small = (max(4 * PAGE_ROWS, longest // 8), max(8 * PAGE_ROWS, longest // 2))
    tables = calibrate(prefix, contexts=small, batches=(1, 2), mtp=mtp, way=way, steps=grid.steps)
    shapes = [
        Shape(context=longest, batch=batch, mtp=mtp, steps=grid.steps + 1) for batch in grid.batches
    ]
    return [_row(prefix, tables, shape, way) for shape in shapes]


def _row(prefix: Prefix, tables: CpuTables, shape: Shape, way: Way) -> Row:
    watched = Watched(prefix, shape, way)
    try:
        for _ in range(shape.steps):
            watched.step()
    finally:
        watched.arm.close()
    measured = statistics.median(watched.arm.taken.seconds[1:]) * 1e3
    predicted = tables.step_us(queries=shape.batch * shape.mtp, context=shape.context) / 1e3
    return agreement(
        name="step of the embedded model",
        unit="ms",
        ours=predicted,
        published=("measured", measured),
        tolerance=LARGEST_MAX,
        config={
            "ctx": shape.context,
            "batch": shape.batch,
            "mtp": shape.mtp,
            "ratio": way.ratio,
        },
    )


def _summary(rows: list[Row]) -> list[Row]:
    errors = [abs(row.value / (row.baseline_value or row.value) - 1) for row in rows]
    return [
        Row(
            name=f"{what} error of {len(rows)} predicted steps",
            value=value * 100,
            unit="%",
            config={"wanted": f"at most {most:.0%}"},
        )
        for what, value, most in (
            ("median", statistics.median(errors), MEDIAN_MAX),
            ("largest", max(errors), LARGEST_MAX),
        )
    ]
