"""Where the pages of a prompt that leaves come from: one of our sequences, or another engine.

What is lent lies in registered memory and stays as it is until it is given back. A sender takes the
pages over when the prompt is made (`keep`) and closes them when nothing of them is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from ess.array_types import Bytes
from ess.door.handoff import geometry
from ess.door.handoff.outgoing.units import Part
from ess.door.sequences.sequence import Sequence
from ess.layout import ModelLayout
from ess.pool.latent import FULL
from ess.transfer.messages import PieceKind
from ess.transfer.runs import Region, Runs
from ess.units import PAGE_ROWS, div_ceil


class Pages(Protocol):
    @property
    def layout(self) -> ModelLayout: ...

    @property
    def cached_count(self) -> int:
        """Leading tokens whose rows are there before the prompt is computed."""

    @property
    def is_kept(self) -> bool: ...

    @property
    def regions(self) -> Mapping[int, Region]:
        """The memory that lent pages lie in, by number."""

    def lend(self, part: Part) -> Runs | None:
        """Runs of these made pages, layer by layer; None where there is no room for them now."""

    def give_back(self, local: Runs) -> None: ...

    def keep(self) -> Bytes | None:
        """The prompt is made. What is kept beside these rows, if anything is."""

    def close(self) -> None: ...


class SequencePages:
    """Pages of a sequence leave from the latent pool, where they are."""

    def __init__(self, sequence: Sequence, *, token_count: int) -> None:
        latent = sequence.owner.pools.latent
        self._sequence = sequence
        self._latent = latent
        self._row_count = row_count = latent.layout.rows_of(token_count)
        page_count = div_ceil(row_count, PAGE_ROWS)
        self._host_pages = sequence.holding.host_pages[:page_count].astype(np.int64)
        self.regions = {region.number: region for region in geometry.pool_regions(latent)}

    @property
    def layout(self) -> ModelLayout:
        return self._latent.layout

    @property
    def cached_count(self) -> int:
        return self._sequence.cached_count

    @property
    def is_kept(self) -> bool:
        return self._sequence.state == "preempted"

    def lend(self, part: Part) -> Runs | None:
        assert self._is_stored(part), f"{self._sequence!r}: {part} is not stored"
        pages = self._host_pages[part.pages.start : part.pages.stop]
        pool_pages = self._latent.pages.page_count
        return geometry.unit_runs(self.layout, part.kind, part.layers, pages, pool_pages)

    def give_back(self, local: Runs) -> None:
        """Nothing to do: pages are lent where they lie in the pool."""

    def keep(self) -> Bytes | None:
        if self._sequence.state == "active":
            self._sequence.preempt()
        return self._sequence.holding.saved

    def close(self) -> None:
        self._sequence.close()

    def _is_stored(self, part: Part) -> bool:
        """Every row, or key, of the prompt in these pages has been written."""
        masks = self._latent.stored if part.kind is PieceKind.ROWS else self._latent.keyed
        pages = self._host_pages[part.pages.start : part.pages.stop]
        wanted = np.full(len(pages), FULL)
        if part.pages.stop * PAGE_ROWS > self._row_count:
            wanted[-1] = (1 << self._row_count % PAGE_ROWS) - 1
        stored = masks[part.layers.start : part.layers.stop, pages] & wanted
        return bool((stored == wanted).all())


class StagePages(SequencePages):
    """Pages of a stage's part of a prompt: all stages close their sequences when the lead orders
    it, so the sender calls `on_close` instead of closing the sequence. How it ended is among the
    sender's outcomes by then.

        offer --> made, made, ... --> finish --> released, lapsed, given up --> told
          `--> given up: the stage closes the sequence, and is not told

    A handoff that has lapsed while its prompt was being made is told of behind `finish`.
    """

    def __init__(
        self, sequence: Sequence, *, token_count: int, on_close: Callable[[], None]
    ) -> None:
        super().__init__(sequence, token_count=token_count)
        self._on_close = on_close
        self._is_told = False

    def close(self) -> None:
        assert self.is_kept, f"{self._sequence!r}: on_close before the prompt was kept"
        assert not self._is_told, f"{self._sequence!r}: on_close is called twice"
        self._is_told = True
        self._on_close()
