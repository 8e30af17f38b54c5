"""The baseline: an engine without residency, every row of every layer where attention reads it.

What anybody's paged engine does, with our own model and kernels, so that a difference in time is
what residency costs: rows lie by page, a selection becomes addresses through the page table, and a
step ends by counting what was accepted. No slots, no plan, no copy lane, nothing stored behind.
The host keeps what prefill made, for a prefix that comes again; decode does not touch it.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import torch

from ess.door import Offload, Promise, Sequence, Step
from ess.door.checks import as_array
from ess.door.transit import write_new
from ess.flashtrans.views import known
from ess.kernels.streams import Known
from ess.pool.lru import planner
from ess.units import PAGE_ROWS


class Whole(Offload):
    """Runs with modes="resident" and warm=False; `create` as for an Offload."""

    def slots(self, layer: int) -> torch.Tensor:
        return self._whole(layer)

    def _whole(self, layer: int) -> torch.Tensor:
        """[row ids, row_bytes]: row id is address. Made at the first use of a layer."""
        rows: dict[int, torch.Tensor] = self.__dict__.setdefault("_rows", {})
        if layer not in rows:
            count = self._pools.index.pages.page_count * PAGE_ROWS
            rows[layer] = torch.zeros(count, self.layout.row_bytes, dtype=torch.uint8)
        return rows[layer]

    def open(
        self,
        tokens: Many[int],
        *,
        length_max: int | None = None,
        promise: Promise = "all",
        salt: bytes = b"",
        reuse_max: int | None = None,
    ) -> Sequence:
        opened = super().open(
            tokens, length_max=length_max, promise=promise, salt=salt, reuse_max=reuse_max
        )
        count = opened.cached_count
        active = self.active_rows(opened, 0, count).long()
        on_host = self.host_rows(opened, 0, count).long()
        for layer in range(self.layout.layer_total):
            self._whole(layer)[active] = self.host(layer)[on_host]
        return opened

    def import_rows(self, sequence: Sequence, *, layer: int, start: int, rows: Any) -> None:
        super().import_rows(sequence, layer=layer, start=start, rows=rows)
        self._whole(layer)[self.active_rows(sequence, start, len(rows)).long()] = rows

    def append(
        self, layer: int, rows: Any, step: Step, *, keys: Any = None, first_query: int = 0
    ) -> None:
        self._require_step(step)
        array = as_array(rows, "rows", "uint8", (None, self.layout.row_bytes))
        stop = first_query + len(array)
        if keys is not None:
            keys = as_array(keys, "keys", "uint8", (len(array), self._pools.index.keys.key_bytes))
        ids, group = step.rows[first_query:stop], self.layout.group_of(layer)
        slab = self._slab(layer)
        write_new(self._pools, group, ids, keys, slab=slab, slots=ids, rows=array)
        step.row_counts[layer] = stop
        if stop == step.query_count:
            step.appended.add(layer)

    def _slab(self, layer: int) -> Known:
        slabs: dict[int, Known] = self.__dict__.setdefault("_slabs", {})
        if layer not in slabs:
            slabs[layer] = known(self._whole(layer).numpy())
        return slabs[layer]

    def refill(self, sequences: Many[Sequence]) -> int:
        """Nothing is ever absent."""
        return 0

    def locate(
        self, layer: int, selection: Any, step: Step, *, queries: Many[int] | None = None
    ) -> torch.Tensor:
        """Every selected row is here: its address is its row id."""
        chosen = np.array(range(step.query_count) if queries is None else queries, np.int32)
        array = as_array(selection, "selection", "int32", (len(chosen), self.layout.top_k))
        rows = np.empty_like(array)
        lines, lengths = step.query_line[chosen], step.lengths(layer)[chosen]
        planner.translate(array, self._pools.tables.lines, lines, lengths, out=rows)
        return torch.from_numpy(rows)

    def locate_all(
        self, layer: int, selection: Any, step: Step, *, first_query: int = 0
    ) -> torch.Tensor | None:
        return self.locate(
            layer, selection, step, queries=range(first_query, first_query + len(selection))
        )

    def seal(self, step: Step, *, accepted: Many[int]) -> None:
        self._require_step(step)
        lines = [sequence.line for sequence in step.sequences]
        self._pools.tables.lengths[lines] += np.array(accepted, np.int32)
        self._step = None
        self._sealed.append(step)
