"""A placement that misses a given number of rows."""

from __future__ import annotations

import numpy as np

from ess.bench.engine.arms.around import WrappedPlacement
from ess.door import Step
from ess.door.steps.placement import Array
from ess.pool.lru import planner


class Forced(WrappedPlacement):
    """Drops `miss_count` resident rows of each request's selection in a layer just before it is
    resolved, spread evenly over the selection. Rows not yet stored stay: they cannot be fetched.
    Needs an arena that would hold everything, or other misses are added."""

    miss_count = 0

    def before_resolve(self, step: Step, group: int, queries: range, selection: Array) -> None:
        if self.miss_count:
            self._drop(step, group, queries, selection)

    def _drop(self, step: Step, group: int, queries: range, selection: Array) -> None:
        pools, mine = self.slots.pools, slice(queries.start, queries.stop)
        layer = pools.layout.groups[group][0]
        rows, lines = np.empty_like(selection), step.query_line[mine]
        lengths = step.lengths(layer)[mine]
        planner.translate(selection, pools.tables.lines, lines, lengths, out=rows)
        for line in np.unique(lines):
            chosen = np.unique(rows[lines == line])
            chosen = chosen[chosen >= 0]
            slots = pools.sparse.locate(group, chosen)
            chosen = chosen[(slots >= 0) & ~pools.sparse.is_dirty(slots)]
            count = min(self.miss_count, len(chosen))
            places = np.linspace(0, len(chosen), count, endpoint=False).astype(np.int64)
            pools.sparse.drop([group], np.ascontiguousarray(chosen[places], np.int32))
