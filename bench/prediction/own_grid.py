"""Steps of the embedded model over batches, contexts, ratios, drafts and prompt chunks.

For every number of drafts and every batch the stages are timed at other contexts and at one ratio
of slots, and prompt chunks without decode. From these tables every step of the grid is predicted,
and measured. Only the number of missed rows is taken from the measured step: their cost is
predicted; their number is predicted by `ess-bench locality`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from ess.bench.harness.folders import default_folder
from ess.bench.harness.lists import amount, shares, sizes
from ess.bench.harness.output.agreement import agreement
from ess.bench.harness.prefix import SEGMENT, Prefix, check_memory, embedded_prefix
from ess.bench.harness.report import Row
from ess.bench.harness.threads import compute_threads
from ess.bench.prediction.grid import Cell, Grid
from ess.bench.prediction.step_tables import (
    StepTables,
    TimedStep,
    chunk_surface,
    miss_us,
    step_tables,
    timed_in_turns,
    visited,
)

MEDIAN_MAX: Final = 0.05
LARGEST_MAX: Final = 0.10

SMOKE: Final = Grid(
    contexts=[704],
    batches=[1, 2],
    ratios=[0.5],
    drafts=[2],
    chunks=[64],
    timed_contexts=[512, 640],
    timed_chunks=[64],
    timed_ratio=0.3,
    requests_timed=3,
    steps=6,
    chunk_steps=2,
)


def own_grid_benchmark(
    *,
    ctx: str = "4k,16k,64k",
    batch: str = "1,2,4,8,16",
    ratio: str = "0.2,0.3,0.5",
    mtp: str = "1,2,4",
    chunk: str = "256,512",
    timed_ctx: str = "3k,12k,32k",
    timed_chunk: str = "128,512",
    steps: int = 15,
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
    chunk
        Prompt tokens that run beside a step, a list.
    timed_ctx
        Context lengths of the tables, a list.
    timed_chunk
        Prompt tokens of the tables, a list.
    steps
        Least steps of a cell in all visits, more for small batches; a visit's first is left out.
    """
    asked = Grid(
        contexts=sizes("--ctx", ctx),
        batches=sizes("--batch", batch),
        ratios=list(shares("--ratio", ratio)),
        drafts=sizes("--mtp", mtp),
        chunks=sizes("--chunk", chunk),
        timed_contexts=sizes("--timed-ctx", timed_ctx),
        timed_chunks=sizes("--timed-chunk", timed_chunk),
        timed_ratio=0.3,
        requests_timed=64,
        steps=amount("--steps", steps),
        chunk_steps=3,
    )
    if not smoke:
        asked.check()
        check_memory(max(asked.contexts) * max(asked.batches))
    return rows_of(SMOKE if smoke else asked, with_folder=not smoke)


@compute_threads(1)
def rows_of(grid: Grid, *, with_folder: bool) -> list[Row]:
    longest = max(*grid.contexts, *grid.timed_contexts)
    prefix = embedded_prefix(
        longest,
        folder=default_folder() if with_folder else None,
        segment=min(SEGMENT, min(grid.contexts)),
    )
    rows = [row for mtp in grid.drafts for row in MeasuredGrid(prefix, grid, mtp).rows()]
    steps = [row for row in rows if not row.config["chunk"]]
    mixed = [row for row in rows if row.config["chunk"]]
    return [*rows, *_summary("steps", steps), *_summary("steps with a prompt chunk", mixed)]


@dataclass(slots=True)
class MeasuredGrid:
    """All cells at one number of drafts."""

    prefix: Prefix
    grid: Grid
    mtp: int

    def rows(self) -> list[Row]:
        tables: dict[int, StepTables] = {}
        rows: list[Row] = []
        for batch in self.grid.batches:
            tables[batch], steps = self._batch(batch)
            rows += [_row(cell, tables[batch], step) for cell, step in steps.items()]
        return [*rows, *self._with_chunks(tables)]

    def _batch(self, batch: int) -> tuple[StepTables, dict[Cell, TimedStep]]:
        """The tables of a batch, and the measured steps to predict from them."""
        timed, cells = self.grid.timed_cells(self.mtp, batch), self.grid.cells(self.mtp, batch)
        many = timed[len(timed) // 2]
        few = many._replace(ratio=(1.0 + many.ratio) / 2)
        steps = timed_in_turns(
            partial(visited, self.prefix),
            dict.fromkeys([*timed, few, *cells]),
            steps=self.grid.steps_each(batch),
        )
        tables = step_tables(
            {cell.context: steps[cell] for cell in timed}, miss_us=miss_us(steps[few], steps[many])
        )
        return tables, {cell: steps[cell] for cell in cells}

    def _with_chunks(self, tables: Mapping[int, StepTables]) -> list[Row]:
        timed, cells = self.grid.timed_chunk_cells(self.mtp), self.grid.chunk_cells(self.mtp)
        visit = partial(visited, self.prefix)
        steps = timed_in_turns(visit, [*timed, *cells], steps=self.grid.chunk_steps)
        alone = chunk_surface({(self._before(cell), cell.chunk): steps[cell].us for cell in timed})
        return [
            _row(
                cell,
                tables[cell.batch],
                steps[cell],
                beside_us=alone.at(self._before(cell), cell.chunk),
            )
            for cell in cells
        ]

    def _before(self, cell: Cell) -> int:
        """Tokens before the chunk of a usual step, with those of the visit's earlier steps."""
        return cell.context + cell.chunk * self.grid.chunk_steps // 2


def _row(cell: Cell, tables: StepTables, measured: TimedStep, *, beside_us: float = 0.0) -> Row:
    us = tables.us(context=cell.context, misses=measured.misses) + beside_us
    return agreement(
        name="step of the embedded model",
        unit="ms",
        ours=us / 1e3,
        published=("measured", measured.us / 1e3),
        tolerance=LARGEST_MAX,
        config={
            "ctx": cell.context,
            "batch": cell.batch,
            "mtp": cell.mtp,
            "ratio": cell.ratio,
            "chunk": cell.chunk,
            "misses": round(measured.misses),
        },
    )


def _summary(name: str, rows: list[Row]) -> list[Row]:
    if not rows:
        return []
    errors = [abs(row.value / (row.baseline_value or row.value) - 1) for row in rows]
    return [
        Row(
            name=f"{what} error of {len(rows)} predicted {name}",
            value=value * 100,
            unit="%",
            config={"wanted": f"at most {most:.0%}"},
        )
        for what, value, most in (
            ("median", statistics.median(errors), MEDIAN_MAX),
            ("largest", max(errors), LARGEST_MAX),
        )
    ]
