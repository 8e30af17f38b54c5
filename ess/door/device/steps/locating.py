"""Where selected rows are, without fetching any."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from ess.door.device.memory.device_pools import DevicePools
from ess.door.device.memory.maps import rows_of
from ess.door.device.memory.uploads import upload
from ess.door.steps.arrays import Array
from ess.door.steps.step import Step
from ess.pool.lru.cuda import Residency
from ess.pool.lru.cuda_shape import Moment, ResolveShape
from ess.pool.lru.cuda_workspaces import ResidencyWorkspaces
from ess.units import PAGE_ROWS


class Locating:
    """Calls that may meet absent rows, in workspaces of their own: faults in their reports do not
    count. `rows` is room for the row ids of a step's selection."""

    def __init__(self, pools: DevicePools, rows: Tensor) -> None:
        device = pools.lane.device
        shape = ResolveShape.of(query_max=1, top_k=1, block_max=pools.sparse.block_max)
        self.works = ResidencyWorkspaces(
            device, shape, pools.ints, group_count=pools.layout.group_count, ring=1
        )
        self.calls = [
            Residency(device, arena, self.works, group=group)
            for group, arena in enumerate(pools.sparse.arenas)
        ]
        self._pools, self._rows = pools, rows
        self._counts: dict[int, Tensor] = {}

    def slots(
        self,
        residency: Residency,
        moment: Moment,
        step: Step,
        layer: int,
        queries: Many[int] | Tensor,
        selection: Array,
    ) -> Tensor:
        """-1 where a row is absent."""
        lines, lengths = self._context(step, layer, queries)
        slots = torch.empty_like(selection)
        residency.locate(
            slots,
            self._rows[: len(selection)],
            stream=self._pools.lane.compute,
            moment=moment,
            query_count=self._count(len(selection)),
            positions=selection,
            page_table=self._pools.tables.maps.lines,
            table_row=lines,
            length=lengths,
        )
        return slots

    def _context(
        self, step: Step, layer: int, queries: Many[int] | Tensor
    ) -> tuple[Tensor, Tensor]:
        """The line and the length of each of these queries."""
        lines, lengths = step.query_line, step.lengths(layer)
        if isinstance(queries, range):
            return lines[queries.start : queries.stop], lengths[queries.start : queries.stop]
        if not isinstance(queries, Tensor):
            queries = upload(np.array(queries, np.int32), self._pools.lane.home)
        return lines.index_select(0, queries), lengths.index_select(0, queries)

    def _count(self, number: int) -> Tensor:
        """int32 [1] on the device; graphs read it where it is."""
        if number not in self._counts:
            self._counts[number] = upload(np.array([number], np.int32), self._pools.lane.home)
        return self._counts[number]

    def host_codes(self, step: Step, layer: int, queries: range, selection: Array) -> Tensor:
        """-2 - host row, or the slot of a row that is newer than its host."""
        pools, group = self._pools, self._pools.layout.group_of(layer)
        lines, _ = self._context(step, layer, queries)
        chosen, maps = selection >= 0, pools.tables.maps
        every = lines.unsqueeze(1).expand_as(selection).reshape(-1)
        rows = rows_of(maps, every, selection.reshape(-1).clamp(min=0)).clamp(min=0)
        pages = maps.host_page_of.index_select(0, rows // PAGE_ROWS)
        host_rows = pages * PAGE_ROWS + rows % PAGE_ROWS
        slots = pools.sparse.slot_of[group].index_select(0, rows)
        newer = (slots >= 0) & (pools.sparse.dirty.index_select(0, slots.clamp(min=0)) != 0)
        codes = torch.where(newer, slots, -2 - host_rows).view_as(selection)
        return torch.where(chosen, codes, -1)
