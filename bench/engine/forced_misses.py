"""An offload that misses as many rows as it is told to."""

from __future__ import annotations

from typing import Any

import numpy as np

from ess.door import Offload, Resolution, Step
from ess.door.checks import as_array
from ess.pool.lru import planner


class Forced(Offload):
    """Of what each request selects in a layer, `miss_count` resident rows are dropped just before
    it is resolved, spread evenly over the selection. Rows not yet stored stay: they cannot be
    fetched. Needs an arena that would hold everything, or misses come on top."""

    miss_count = 0

    def resolve(
        self,
        layer: int,
        selection: Any,
        step: Step,
        *,
        first_query: int = 0,
        part: int | None = None,
        waits: bool = False,
    ) -> Resolution:
        group = self.layout.group_of(layer)
        if self.miss_count and self.layout.groups[group][0] == layer:
            self._drop(layer, group, selection, step, first_query)
        return super().resolve(
            layer, selection, step, first_query=first_query, part=part, waits=waits
        )

    def _drop(self, layer: int, group: int, selection: Any, step: Step, first_query: int) -> None:
        array = as_array(selection, "selection", "int32", (None, self.layout.top_k))
        queries = slice(first_query, first_query + len(array))
        rows = np.empty_like(array)
        lines = step.query_line[queries]
        lengths = step.lengths(layer)[queries]
        planner.translate(array, self._pools.tables.lines, lines, lengths, out=rows)
        pool = self._pools.sparse
        for line in np.unique(lines):
            chosen = np.unique(rows[lines == line])
            chosen = chosen[chosen >= 0]
            slots = pool.locate(group, chosen)
            chosen = chosen[(slots >= 0) & ~pool.is_dirty(slots)]
            count = min(self.miss_count, len(chosen))
            places = np.linspace(0, len(chosen), count, endpoint=False).astype(np.int64)
            pool.drop([group], np.ascontiguousarray(chosen[places], np.int32))
