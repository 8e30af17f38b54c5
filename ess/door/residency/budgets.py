"""Budgets follow the live miss curves: now and then chunks of slots change their group.

40 GiB of slots of DeepSeek-V3.2 are a million chunks, and what is decided takes as long as curves
have points. So chunks move by pieces, of which each slab has about a thousand, or 16 for each of
its groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from ess.array_types import Counts
from ess.door.memory.pools import Pools
from ess.pool.budget import Curve, best_division, live_curve, next_move
from ess.pool.capacity import SLOTS, WINDOW_SLOTS
from ess.units import div_ceil

SHARE: Final = 64
PIECES: Final = 1024
PIECES_EACH: Final = 16


class Sharing(NamedTuple):
    """Groups with rows of one size, which share chunks. `piece` chunks move together; curves,
    floors and `wanted` count pieces."""

    groups: tuple[int, ...]
    piece: int
    curves: list[Curve]
    floors: list[int]
    wanted: tuple[int, ...]

    def next_move(self, counts: list[int]) -> tuple[int, int] | None:
        """Source and target of the next piece, if its move pays. `counts` are chunks by group."""
        held = [counts[group] // self.piece for group in self.groups]
        move = next_move(self.curves, held, self.floors, self.wanted)
        return None if move is None else (self.groups[move[0]], self.groups[move[1]])


@dataclass(slots=True)
class Budgets:
    """The counts when budgets were last rebalanced; curves are of the hits and misses since
    then."""

    pools: Pools
    _step: int = field(init=False)
    _hits: list[Counts] = field(init=False)
    _misses: Counts = field(init=False)

    def __post_init__(self) -> None:
        sparse = self.pools.sparse
        self._step = sparse.step
        self._hits = [sparse.hit_age(g) for g in range(self.pools.layout.group_count)]
        self._misses = np.zeros(len(self._hits), np.int64)

    def rebalance(self, misses: Counts) -> int:
        """Moves at most a 64th of all chunks, or a piece; returns how many. `misses` count since
        the start.

        Between steps no row is read, so rows that the last step selected may move: one age passes.
        """
        sparse = self.pools.sparse
        if sparse.step == self._step:
            return 0
        sharings, chunk_count = self._sharings(misses), sum(sparse.chunks.counts())
        sparse.begin_step()
        self._step = sparse.step
        moved = 0
        while moved < max(1, chunk_count // SHARE):
            piece = self._move_next(sharings)
            if not piece:
                break
            moved += piece
        return moved

    def _move_next(self, sharings: list[Sharing]) -> int:
        """Moves the first piece whose move pays; returns its chunks, or 0."""
        chunks = self.pools.sparse.chunks
        for sharing in sharings:
            move = sharing.next_move(chunks.counts())
            if move is not None:
                if not self.pools.sparse.move_chunks(*move, sharing.piece):
                    return 0
                source = move[0]
                assert chunks.counts()[source] >= self.floor(source), f"group {source} is too small"
                return sharing.piece
        return 0

    def _sharings(self, misses: Counts) -> list[Sharing]:
        """How chunks would be shared best now, for each size of rows."""
        layout, counts = self.pools.layout, self.pools.sparse.chunks.counts()
        curves, sharings = self._curves(misses), []
        for size in layout.row_sizes:
            groups = tuple(layout.size_groups(size))
            piece, own = self._piece(groups[0]), [curves[group] for group in groups]
            held = [counts[group] // piece for group in groups]
            floors = [
                div_ceil(max(0, self.floor(group) - counts[group] % piece), piece)
                for group in groups
            ]
            wanted = best_division(own, held, floors)
            sharings.append(Sharing(groups, piece, own, floors, wanted))
        return sharings

    def _curves(self, misses: Counts) -> list[Curve]:
        """Rows per step that every group would fetch, over all its layers, by pieces."""
        sparse, layout = self.pools.sparse, self.pools.layout
        step_count, counts = sparse.step - self._step, sparse.chunks.counts()
        assert step_count > 0, f"{step_count} steps since budgets were looked at"
        assert (misses >= self._misses).all(), f"{misses} misses, {self._misses} before"
        curves = []
        for group, layers in enumerate(layout.groups):
            hits, each = sparse.hit_age(group), sparse.chunks.slots_each(group)
            piece = self._piece(group)
            rest = counts[group] % piece
            curve = live_curve(
                hits=(hits - self._hits[group]) / step_count,
                rows=sparse.resident_age(group),
                misses=float(misses[group] - self._misses[group]) / step_count,
                slots=sparse.slot_count(group),
                chunk=piece * each,
                chunk_count=sparse.chunks.slab(group).chunk_count // piece,
                first=rest * each,
            )
            most = (sparse.chunks.most(group) - rest) // piece
            curve[most:] = curve[most]
            curves.append(curve * len(layers))
            self._hits[group] = hits
        self._misses = misses.copy()
        return curves

    def _piece(self, group: int) -> int:
        """Chunks of this group's slab that move together."""
        slab = self.pools.sparse.chunks.slab(group)
        return max(1, slab.chunk_count // max(PIECES, PIECES_EACH * len(slab.groups)))

    def floor(self, group: int) -> int:
        """Chunks for the slots that running requests have reserved, and for a step's new rows."""
        name = WINDOW_SLOTS if self.pools.layout.window_of(group) else SLOTS
        slots = max(self.pools.ledger.promised(name), self.pools.sizes.query_max)
        assert slots > 0, f"group {group}: a floor of {slots} slots"
        return div_ceil(slots, self.pools.sparse.chunks.slots_each(group))

    def check(self) -> None:
        """Audit: counts were taken in the past, and only grow."""
        sparse = self.pools.sparse
        assert self._step <= sparse.step, f"looked at in step {self._step}, it is {sparse.step}"
        assert (self._misses >= 0).all(), f"{self._misses} misses"
        for group, hits in enumerate(self._hits):
            assert (hits <= sparse.hit_age(group)).all(), f"group {group} has lost hits"
