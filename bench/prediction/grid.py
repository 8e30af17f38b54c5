"""Which steps are timed for the tables, and which are predicted and measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from ess.bench.engine.arms.decode_arm import STAGGER
from ess.errors import BadInput
from ess.units import div_ceil

ROWS_MAX: Final = 1 << 18
"""The most tokens of a cell: 64 x 4K, or 4 x 64K. A row is 656 bytes in each of 7 layers."""

VISITS: Final = 3
"""How often each cell is visited: see `timed_in_turns`."""


class Cell(NamedTuple):
    """One step; `chunk` prompt tokens run beside it."""

    context: int
    batch: int
    mtp: int
    ratio: float
    chunk: int = 0

    def __str__(self) -> str:
        beside = f", {self.chunk} prompt tokens" if self.chunk else ""
        return (
            f"{self.batch} x {self.context:,} tokens, {self.mtp} a step, ratio {self.ratio:g}"
            f"{beside}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """`timed_contexts` and `timed_chunks` are those of the tables, at `timed_ratio`. Over all
    visits a cell gets `steps` timed steps, or as many as `requests_timed` requests need for one
    each; a cell with a chunk gets `chunk_steps` in each visit."""

    contexts: list[int]
    batches: list[int]
    ratios: list[float]
    drafts: list[int]
    chunks: list[int]
    timed_contexts: list[int]
    timed_chunks: list[int]
    timed_ratio: float
    requests_timed: int
    steps: int
    chunk_steps: int

    def check(self) -> None:
        """Refuses a grid in which a batch has no tables, or a context no batch beside a chunk."""
        bounds = (
            f"at least {STAGGER} tokens for each request and {STAGGER} more, "
            f"at most {ROWS_MAX:,} of all"
        )
        for batch in self.batches:
            if sum(_fits(context, batch) for context in self.timed_contexts) < 2:
                raise BadInput(f"--batch {batch}: two of --timed-ctx must fit it, {bounds}")
        for context in self.contexts:
            if not any(_fits(context, batch + 1) for batch in self.batches):
                raise BadInput(f"--ctx {context}: no --batch and one more fits it, {bounds}")

    def steps_each(self, batch: int) -> int:
        """Timed steps of a visit."""
        return max(2, div_ceil(max(self.steps, self.requests_timed // batch), VISITS))

    def timed_cells(self, mtp: int, batch: int) -> list[Cell]:
        return [
            Cell(context, batch, mtp, self.timed_ratio)
            for context in self.timed_contexts
            if _fits(context, batch)
        ]

    def cells(self, mtp: int, batch: int) -> list[Cell]:
        """Every pair of values occurs, not every triple: ratios take turns."""
        turn = self.drafts.index(mtp) + self.batches.index(batch)
        return [
            Cell(context, batch, mtp, self.ratios[(turn + row) % len(self.ratios)])
            for row, context in enumerate(self.contexts)
            if _fits(context, batch)
        ]

    def timed_chunk_cells(self, mtp: int) -> list[Cell]:
        """Cells of chunks without decode."""
        return [
            Cell(context, 0, mtp, self.timed_ratio, chunk)
            for context in self.timed_contexts
            for chunk in self.timed_chunks
        ]

    def chunk_cells(self, mtp: int) -> list[Cell]:
        """One for each context and chunk: batches take turns."""
        cells = []
        for row, context in enumerate(self.contexts):
            batches = [batch for batch in self.batches if _fits(context, batch + 1)]
            for column, chunk in enumerate(self.chunks):
                batch = batches[(self.drafts.index(mtp) + row + column) % len(batches)]
                cells.append(Cell(context, batch, mtp, self.timed_ratio, chunk))
        return cells


def _fits(context: int, batch: int) -> bool:
    """Each request is a page shorter than the one before it, and the last still has two."""
    return context * batch <= ROWS_MAX and context >= STAGGER * (batch + 1)
