"""Which cells of a grid are timed, and what tables say of a step that was not."""

from __future__ import annotations

import itertools

import pytest

from ess.bench.prediction.grid import ROWS_MAX, Cell, Grid
from ess.bench.prediction.step_tables import (
    TimedStep,
    chunk_surface,
    miss_us,
    step_tables,
    timed_in_turns,
)

GRID = Grid(
    contexts=[4096, 16_384, 65_536],
    batches=[1, 2, 4, 8, 16],
    ratios=[0.2, 0.3, 0.5],
    drafts=[1, 2, 4],
    chunks=[256, 512],
    timed_contexts=[3072, 12_288, 32_768],
    timed_chunks=[128, 512],
    timed_ratio=0.3,
    requests_timed=64,
    steps=15,
    chunk_steps=3,
)


def timed(context: int, misses: float) -> TimedStep:
    """Half a microsecond a miss to plan and one to wait for, keys by the context."""
    return TimedStep({"select": context / 8, "plan": misses / 2, "wait": misses}, misses)


def test_every_pair_of_values_meets_in_the_grid():
    cells = [
        cell for mtp in GRID.drafts for batch in GRID.batches for cell in GRID.cells(mtp, batch)
    ]
    assert max(cell.context * cell.batch for cell in cells) == ROWS_MAX
    met = {
        (name, getattr(cell, name), cell.ratio)
        for cell in cells
        for name in ("context", "batch", "mtp")
    }
    wanted = [
        *(("context", each) for each in GRID.contexts),
        *(("batch", each) for each in GRID.batches),
        *(("mtp", each) for each in GRID.drafts),
    ]
    assert met == {(*pair, ratio) for pair, ratio in itertools.product(wanted, GRID.ratios)}


def test_chunks_run_beside_batches_that_fit_and_are_timed_alone():
    for mtp in GRID.drafts:
        cells = GRID.chunk_cells(mtp)
        assert {(cell.context, cell.chunk) for cell in cells} == set(
            itertools.product(GRID.contexts, GRID.chunks)
        )
        assert all(cell.context * (cell.batch + 1) <= ROWS_MAX for cell in cells)
        assert {cell.batch for cell in GRID.timed_chunk_cells(mtp)} == {0}


def test_a_step_is_predicted_at_another_context_with_other_misses():
    price = miss_us(timed(4096, 100), timed(4096, 300))
    assert price == pytest.approx(1.5)
    tables = step_tables({1024: timed(1024, 100), 4096: timed(4096, 300)}, miss_us=price)
    for context, misses in ((2048, 700), (16_384, 50)):
        assert tables.us(context=context, misses=misses) == pytest.approx(timed(context, misses).us)


def test_as_many_misses_at_both_ratios_say_no_price():
    assert miss_us(timed(4096, 300), timed(4096, 300)) == 0.0


def test_chunks_are_read_by_what_is_before_them_and_their_own_tokens():
    points = {
        (before, tokens): float(tokens * (before + 1000))
        for before in (1024, 4096)
        for tokens in (128, 512)
    }
    assert chunk_surface(points).at(2048, 256) == pytest.approx(256 * 3048)


def test_cells_are_visited_there_and_back_and_the_fastest_steps_count():
    """One visit at a time; each step of this machine is 1 us slower than the one before."""
    cells = [Cell(context, 1, 2, 0.3) for context in (1024, 2048, 4096)]
    order: list[Cell] = []
    ticks = itertools.count(10)

    def visit(cell: Cell, steps: int) -> list[TimedStep]:
        order.append(cell)
        return [TimedStep({"select": 1.0}, 0.0), *(timed_at(next(ticks)) for _ in range(steps - 1))]

    timed = timed_in_turns(visit, cells, steps=3)
    assert order == [*cells, *reversed(cells), *cells]
    assert [timed[cell].us for cell in cells] == [10.5, 12.5, 14.5], "the first two of six, not 1.0"


def timed_at(us: int) -> TimedStep:
    return TimedStep({"select": float(us)}, 0.0)
