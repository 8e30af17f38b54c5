"""Rows of pages that leave the device: out of every group, before the pages' ids mean others."""

from __future__ import annotations

from ess.door.device.memory.device_pools import DevicePools
from ess.door.device.memory.uploads import upload
from ess.pool.index import page_rows
from ess.pool.lru.cuda import Residency
from ess.pool.lru.cuda_shape import ResolveShape
from ess.pool.lru.cuda_workspaces import ResidencyWorkspaces
from ess.pool.pages import PageIds


class Leaving:
    def __init__(self, pools: DevicePools) -> None:
        self._pools = pools
        device, count = pools.lane.device, pools.layout.group_count
        shape = ResolveShape.of(query_max=1, top_k=1, block_max=1)
        self._works = ResidencyWorkspaces(device, shape, pools.ints, group_count=count, ring=1)
        self._groups = [
            Residency(device, arena, self._works, group=group)
            for group, arena in enumerate(pools.sparse.arenas)
        ]

    def drop(self, active: PageIds) -> None:
        """On compute, behind the steps that are queued and before those to come."""
        pools, stream = self._pools, self._pools.lane.compute
        rows = upload(page_rows(active), pools.lane.home)
        self._works.begin(stream=stream)
        for residency in self._groups:
            residency.drop(rows, stream=stream)
        pools.counting.add("leave", self._works.reports.view(1, pools.layout.group_count, -1))
