"""The common part of all layers whose queries select rows: where the rows are, and attention.

This is where the door and the kernels meet. It holds what one stage hands to a later one and
nothing that outlives the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ess.door import Resolution
from ess.engine.layers.batch import attend, select, select_window
from ess.engine.layers.front import Asking
from ess.engine.step.half import Half
from ess.errors import BadState
from ess.kernels.merge import Partial
from ess.overlap.policy import Mode
from ess.overlap.timeline import Timeline, timed


@dataclass(frozen=True, slots=True)
class LocatedRows:
    """A part of the batch and where its rows are; `where` is None if they were only located."""

    part: range
    slots: Tensor
    where: Resolution | None = None

    @property
    def resolution(self) -> Resolution:
        assert self.where is not None, "rows that were only located are attended in one pass"
        return self.where


class SelectedRows(ABC):
    """`Stages` for a layer whose queries select rows: asked by a schedule, then dropped. The
    family's kind of layer says what it asks the indexer and how it attends."""

    def __init__(
        self, half: Half, number: int, timeline: Timeline, *, window: int = 0, waits: bool = False
    ) -> None:
        """`number` is the layer's at the door, and `window` how many of the last rows it selects
        where no indexer does. `waits`: the schedule waits for a fetch before anything else runs."""
        self.timeline = timeline
        self._waits = waits
        self.number = number
        self.first_query = half.queries.start
        self._half = half
        self._batch = half.batch
        self._window = window
        self._group = half.batch.layout.group_of(number)
        self._asking: Asking | None = None
        self._queries: Tensor | None = None

    def parts(self, count: int) -> list[range]:
        return self._half.parts(count)

    @abstractmethod
    def index(self) -> None:
        """Stores new rows and keys, and makes the index queries."""

    @abstractmethod
    def pre_attn(self) -> None:
        """Makes the queries of attention."""

    @timed
    def select(self, part: range) -> Tensor | None:
        """The part's selection; None when the group's first layer has made it already."""
        asking = self._asking
        if asking is None or not (self._window or asking.queries is not None):
            return None
        selected = self._batch.selected.setdefault(self._group, {})
        if part in selected:
            return selected[part]
        span = None if part == self._half.queries else self._half.local(part)
        chosen, logits = self._selected(asking, span)
        if logits is not None:
            self._batch.step.observe(self.number, chosen, logits, queries=part)
        assert len(chosen) == len(part), f"{len(chosen)} selections for {len(part)} queries"
        selected[part] = chosen
        return chosen

    def _selected(self, asking: Asking, span: slice | None) -> tuple[Tensor, Tensor | None]:
        """Where slots give way by score, with all the scores that it chose among."""
        batch, asked, weights = self._batch, asking.queries, asking.weights
        if self._window:
            return select_window(batch, self._window, span)
        assert asked is not None, f"layer {self.number} has no indexer"
        assert weights is not None, f"layer {self.number} has no weights of its indexer's heads"
        if span is not None:
            asked, weights = asked[span], weights[span]
        scored = batch.offload.wants_scores
        return select(batch, self.number, asked, weights, span, scored=scored)

    def resolve(self, part: range) -> LocatedRows:
        selection = self.select(part)
        where = self.plan(part, selection)
        return LocatedRows(part, where.slots, where)

    @timed
    def plan(self, part: range, selection: Tensor | None) -> Resolution:
        batch = self._batch
        workspace = self._half.first_workspace + (part.start > self.first_query)
        where = batch.step.resolve(
            self.number, selection, queries=part, workspace=workspace, waits=self._waits
        )
        assert len(where.slots) == len(part), f"{len(where.slots)} queries resolved of {len(part)}"
        if selection is not None:
            batch.warmth.resolved(part, where)
        return where

    def locate(self, part: range) -> LocatedRows | None:
        """Every selected row's slot without a plan; None when one of them has no slot."""
        batch, group = self._batch, self._group
        selection = self.select(part)
        if selection is not None:
            slots = batch.step.locate_all(self.number, selection, queries=part)
            batch.located[group] = slots
            if slots is not None:
                batch.warmth.located(part)
        assert group in batch.located, f"layer {self.number} comes before its group's first layer"
        located = batch.located[group]
        return None if located is None else LocatedRows(part, located)

    def ran(self, mode: Mode) -> Mode:
        """The mode that the layer really ran, when `mode` was planned."""
        if mode is Mode.RESIDENT and self._batch.located[self._group] is None:
            return Mode.NONE
        return mode

    @timed
    def wait(self, rows: LocatedRows) -> None:
        if rows.where is not None:
            rows.where.wait()

    @timed
    def attend_all(self, rows: LocatedRows) -> Partial:
        """Rows that were located have slots; of those that were resolved some may be in place."""
        placed = rows.where is not None
        return self.attend_codes(rows.part, rows.slots, whole=True, placed=placed)

    @timed
    def attend_resident(self, rows: LocatedRows) -> Partial:
        """Hits, and rows in place: both can be read before the fetch has landed. A row that has no
        host page either gets a negative number."""
        place = rows.resolution.place
        assert rows.resolution.hit.shape[0] == place.shape[0], "hits and places of other queries"
        codes = torch.cat((rows.resolution.hit, torch.where(place >= 0, -2 - place, -1)), dim=1)
        return self.attend_codes(rows.part, codes, spares=True)

    @timed
    def attend_fetched(self, rows: LocatedRows, resident: Partial) -> Partial:
        """Runs beside the fetch of a later part, if there is one."""
        spares = rows.part.stop < self._half.queries.stop
        return self.attend_codes(
            rows.part, rows.resolution.miss, placed=False, spares=spares, onto=resident
        )

    def attend_host(self) -> Partial:
        """The same attention over the host's own rows: for verify mode."""
        batch, parts = self._batch, self._batch.selected[self._group]
        assert sum(map(len, parts)) == len(self._half.queries), (
            f"{[*parts]} overlap, or leave a gap"
        )
        selection = torch.cat([parts[part] for part in sorted(parts, key=lambda p: p.start)])
        codes = batch.step.host_codes(self.number, selection, queries=self._half.queries)
        return self.attend_codes(self._half.queries, codes)

    def attend_codes(self, part: range, codes: Tensor, **how: Any) -> Partial:
        if self._queries is None:
            raise BadState("pre_attn comes before attention")
        is_whole = part == self._half.queries
        mine = self._queries if is_whole else self._queries[self._half.local(part)]
        assert len(mine) == len(codes), f"{len(codes)} lists of codes for {len(mine)} queries"
        return attend(self._batch, self.number, mine, codes, **how)
