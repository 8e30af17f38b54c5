"""The stages of one layer in one decode step: what `overlap`'s schedules put in order.

This is where the model, the door and the kernels meet. It holds what one stage hands to a later
one and nothing that outlives the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ess.door import Resolution
from ess.engine.rows import Batch, attend, front, queries, select
from ess.errors import BadState
from ess.kernels.merge import Partial, merge
from ess.models.decoder import DecoderLayer, Front


@dataclass(frozen=True, slots=True)
class Found:
    """A part of the batch and where its rows are."""

    part: range
    where: Resolution


class LayerStep:
    """`Stages` for a layer: made with the layer's input, asked by a schedule, then dropped."""

    def __init__(self, batch: Batch, layer: DecoderLayer, hidden: Tensor) -> None:
        self._batch = batch
        self._layer = layer
        self._group = batch.layout.group_of(layer.number)
        self._hidden = hidden
        self._front: Front | None = None
        self._queries: Tensor | None = None

    @property
    def number(self) -> int:
        return self._layer.number

    def parts(self, count: int) -> list[range]:
        counts = self._batch.step.query_counts
        if count == 1 or len(counts) == 1:
            return [range(sum(counts))]
        cut = sum(counts[: len(counts) // 2])
        return [range(cut), range(cut, sum(counts))]

    def index(self) -> None:
        """The new rows and keys go to their slots first: a token may select itself."""
        batch = self._batch
        self._front = made = front(batch, self._layer, self._hidden)
        batch.offload.append(self._layer.number, made.rows, batch.step, keys=made.keys)

    def select(self, part: range) -> Tensor | None:
        """The part's selection; None when the group's first layer has made it already."""
        if self._front is None or self._front.queries is None or self._front.weights is None:
            return None
        selected = self._batch.selected.setdefault(self._group, {})
        if part in selected:
            return selected[part]
        batch, span = self._batch, slice(part.start, part.stop)
        mine = self._front.queries[span], self._front.weights[span]
        chosen = select(batch, self._layer.number, *mine, span)
        selected[part] = chosen
        return chosen

    def resolve(self, part: range) -> Found:
        batch = self._batch
        where = batch.offload.resolve(
            self._layer.number, self.select(part), batch.step, first_query=part.start
        )
        return Found(part, where)

    def locate(self) -> Tensor | None:
        """Every selected row's slot without a plan; None when one of them has no slot."""
        batch, number = self._batch, self._layer.number
        group = self._group
        [whole] = self.parts(1)
        selection = self.select(whole)
        if selection is not None:
            slots = batch.offload.locate(number, selection, batch.step)
            batch.located[group] = slots if ((slots >= 0) == (selection >= 0)).all() else None
        return batch.located[group]

    def wait(self, found: Found) -> None:
        found.where.wait()

    def pre_attn(self) -> None:
        if self._front is None:
            raise BadState("index comes before pre_attn")
        self._queries = queries(self._batch, self._layer, self._front.query)

    def attend_all(self, found: Found) -> Partial:
        return self.attend_codes(found.part, found.where.slots)

    def attend_resident(self, found: Found) -> Partial:
        """Hits, and rows in place: both can be read before the fetch has landed."""
        codes = torch.where(found.where.place >= 0, -2 - found.where.place, -1)
        return self.attend_codes(found.part, torch.cat((found.where.hit, codes), dim=1))

    def attend_fetched(self, found: Found) -> Partial:
        return self.attend_codes(found.part, found.where.miss)

    def merge(self, resident: Partial, fetched: Partial) -> Partial:
        return merge(resident, fetched)

    def attend_truth(self) -> Tensor:
        """What this layer's attention is over the host's own rows: for verify mode."""
        batch, parts = self._batch, self._batch.selected[self._group]
        selection = torch.cat([parts[part] for part in sorted(parts, key=lambda p: p.start)])
        codes = batch.offload.host_codes(self.number, selection, batch.step)
        return self.attend_codes(range(len(codes)), codes).out

    def attend_codes(self, part: range, codes: Tensor) -> Partial:
        if self._queries is None:
            raise BadState("pre_attn comes before attention")
        return attend(self._batch, self._layer.number, self._queries[part.start : part.stop], codes)
