"""The units of one kind that a handoff sends: which may leave, are on their way, have come.

A unit waits until it is made, is due until it is posted, then under way, then sent; a transfer that
failed, or a receiver that asks again, makes it due again. So nothing leaves before it is made, and
what is asked for again is sent again only if it had left.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np

from ess.transfer.messages import PieceKind
from ess.transfer.runs import RUNS_MAX


class Stage(IntEnum):
    WAITING = 0
    UNDERWAY = 1
    SENT = 2


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring units that one transfer brings: pages of the prompt in each of the layers."""

    kind: PieceKind
    layers: range
    pages: range

    @property
    def unit_count(self) -> int:
        return len(self.layers) * len(self.pages)


PART_BYTES_MAX: Final = 8 << 20


class Units:
    """`made[layer]` pages of it may leave. `unit_bytes` says how many units make a transfer."""

    def __init__(self, kind: PieceKind, layer_count: int, page_count: int, unit_bytes: int) -> None:
        self.kind = kind
        self.made = np.zeros(layer_count, np.int64)
        self.sent_count = 0
        self.wanted_count = layer_count * page_count
        self._stages = np.zeros((layer_count, page_count), np.uint8)
        self._may_be_due = np.zeros(layer_count, np.bool_)
        self._first_page = 0
        self.part_max = max(1, min(PART_BYTES_MAX // max(unit_bytes, 1), RUNS_MAX))

    @property
    def posted_count(self) -> int:
        """Units under way or sent."""
        return int(np.count_nonzero(self._stages[:, self._first_page :]))

    def want(self, first_page: int) -> None:
        """Notes that the receiver has the pages before this one."""
        assert not self.posted_count, "what is wanted is known before anything leaves"
        self._first_page = first_page
        self.wanted_count = len(self.made) * (self._stages.shape[1] - first_page)

    def make(self, layers: range, page_count: int) -> None:
        """Pages before `page_count` of these layers are made; what was made stays so."""
        assert page_count <= self._stages.shape[1], f"{page_count} pages of {self._stages.shape}"
        part = slice(layers.start, layers.stop)
        self.made[part] = np.maximum(self.made[part], page_count)
        self._may_be_due[part] = True

    def next_part(self) -> Part | None:
        """Units that may leave now: pages that follow one another, in as many layers as it can."""
        for layer in np.flatnonzero(self._may_be_due).tolist():
            first, stop = self._first_page, int(self.made[layer])
            due = np.flatnonzero(self._stages[layer, first:stop] == Stage.WAITING)
            if not len(due):
                self._may_be_due[layer] = False
                continue
            begin = first + int(due[0])
            gaps = np.flatnonzero(np.diff(due) > 1)
            run = int(gaps[0]) + 1 if len(gaps) else len(due)
            pages = range(begin, begin + min(run, self.part_max))
            return Part(self.kind, range(layer, self._layer_end(layer, pages)), pages)
        return None

    def _layer_end(self, layer: int, pages: range) -> int:
        """Layers behind this one in which the same pages may leave, as far as a transfer goes."""
        last = min(len(self.made), layer + max(1, self.part_max // len(pages)))
        part = slice(pages.start, pages.stop)
        for following in range(layer + 1, last):
            stages = self._stages[following, part]
            if self.made[following] < pages.stop or (stages != Stage.WAITING).any():
                return following
        return last

    def posted(self, part: Part) -> None:
        assert (self._of(part) == Stage.WAITING).all(), f"{part} is under way or sent"
        assert (self.made[part.layers.start : part.layers.stop] >= part.pages.stop).all(), part
        self._of(part)[:] = Stage.UNDERWAY

    def landed(self, part: Part) -> None:
        assert (self._of(part) == Stage.UNDERWAY).all(), f"{part} was not under way"
        self._of(part)[:] = Stage.SENT
        self.sent_count += part.unit_count

    def failed(self, part: Part) -> None:
        assert (self._of(part) == Stage.UNDERWAY).all(), f"{part} was not under way"
        self._of(part)[:] = Stage.WAITING
        self._may_be_due[part.layers.start : part.layers.stop] = True

    def again(self, part: Part) -> None:
        """Units of this part that have been sent are due again. The rest is on its way, or is none
        of these units."""
        pages = range(max(part.pages.start, self._first_page), part.pages.stop)
        stages = self._of(Part(self.kind, part.layers, pages))
        asked = stages == Stage.SENT
        self.sent_count -= int(np.count_nonzero(asked))
        stages[asked] = Stage.WAITING
        self._may_be_due[part.layers.start : part.layers.stop] = True

    def check(self) -> None:
        stages = self._stages
        assert not stages[:, : self._first_page].any(), f"{self.kind.name}: the receiver has these"
        assert self.sent_count == np.count_nonzero(stages == Stage.SENT), f"{self.kind.name}"
        for layer, made in enumerate(self.made.tolist()):
            assert not stages[layer, made:].any(), f"{self.kind.name}: layer {layer} left unmade"
            waits = (stages[layer, self._first_page : made] == Stage.WAITING).any()
            assert not waits or self._may_be_due[layer], f"{self.kind.name}: layer {layer} is stuck"

    def _of(self, part: Part) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        layers, pages = part.layers, part.pages
        return self._stages[layers.start : layers.stop, pages.start : pages.stop]
