"""Rows that leave the device: with their pages, from every group, before the page ids are used
again; and with blocks that one group gives to another."""

from __future__ import annotations

from typing import Final

import numpy as np

from ess.array_types import Ints, PageIds
from ess.door.device.memory.device_pools import DevicePools
from ess.door.device.memory.uploads import upload, upload_into
from ess.door.device.residency.landings import Landings
from ess.pool.index import page_rows
from ess.pool.lru.cuda import Residency
from ess.pool.lru.cuda_shape import REPORT, ResolveShape
from ess.pool.lru.cuda_workspaces import ResidencyWorkspaces, now_of

HELD: Final = REPORT.index("held")
TICKETS_MAX: Final = (1 << 31) - 1


class Leaving:
    def __init__(self, pools: DevicePools, landings: Landings) -> None:
        self._pools = pools
        self._landings = landings
        device, count = pools.lane.device, pools.layout.group_count
        shape = ResolveShape.of(query_max=1, top_k=1, block_max=1)
        self._works = ResidencyWorkspaces(device, shape, pools.ints, group_count=count, ring=1)
        self._groups = [
            Residency(device, arena, self._works, group=group)
            for group, arena in enumerate(pools.sparse.arenas)
        ]

    def drop(self, active: PageIds) -> None:
        """Drops the rows on compute: after all work that still reads or fills their slots, and
        before work that may get those slots."""
        pools, stream = self._pools, self._pools.lane.compute
        pools.lane.hold_compute()
        self._landings.hold_for_pages(active)
        rows = upload(page_rows(active), pools.lane.home)
        self._works.begin(stream=stream)
        for residency in self._groups:
            residency.drop(rows, stream=stream)
        pools.counting.add("leave", self._works.reports.view(1, pools.layout.group_count, -1))

    def clear(self, group: int, blocks: Ints) -> bool:
        """Clears slots without regard to their tickets: called after a step has ended and all
        copies have landed."""
        pools, stream, works = self._pools, self._pools.lane.compute, self._works
        now = now_of(
            step=pools.sparse.now,
            ticket=TICKETS_MAX,
            landed=TICKETS_MAX,
            behind=TICKETS_MAX,
            query_count=0,
        )
        upload_into(works.now, np.array(now, np.int32))
        works.begin(stream=stream)
        self._groups[group].clear_blocks(upload(blocks, pools.lane.home), stream=stream)
        reports = works.reports.view(1, pools.layout.group_count, -1)
        pools.counting.add("leave", reports)
        return not int(reports[0, group, HELD])
