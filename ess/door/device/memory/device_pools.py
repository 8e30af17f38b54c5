"""All pools of one worker whose slots are on a device, sized as those of a host are."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ess.door.device.memory.arenas import DeviceArenas
from ess.door.device.memory.counting import Counting
from ess.door.device.memory.keys import DeviceKeys
from ess.door.device.memory.lane import DeviceLane
from ess.door.device.memory.maps import DeviceIndex, DeviceTables, Maps
from ess.door.device.memory.queries import DeviceArrays, Queries
from ess.door.memory.inflight import Pending
from ess.door.memory.pools import Counts, Pools, PoolSizes, make_ledger
from ess.door.memory.shelf import Shelf
from ess.door.steps.arrays import Brought
from ess.errors import BadInput, Unavailable
from ess.kernels.cuda.pinned import pinned_memory
from ess.kernels.streams import RowCopy
from ess.layout import ModelLayout
from ess.pool.disk.elsewhere import Elsewhere
from ess.pool.disk.tier import DiskTier
from ess.pool.latent import LatentPool
from ess.pool.lru.cuda_workspaces import Claims
from ess.units import PAGE_ROWS, div_ceil


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePools(Pools):
    index: DeviceIndex
    tables: DeviceTables
    sparse: DeviceArenas
    lane: DeviceLane
    queries: Queries
    counting: Counting
    has_pads: ClassVar[bool] = True

    def step_arrays(
        self, lines: list[int], query_counts: Many[int], room: int, brought: Brought | None
    ) -> DeviceArrays:
        if brought is not None:
            raise BadInput("row_counts are given: on a device each query brings a row")
        return self.queries.begin(lines, query_counts, room)

    def copies(self, group: int, claims: Claims) -> list[RowCopy]:
        """Claimed rows into their slots, for each layer of the group."""
        return [
            RowCopy(
                source=torch.from_numpy(self.latent.rows[layer]),
                source_rows=claims.host_rows,
                target=self.sparse.member_slab(member),
                target_rows=claims.slots,
                count=claims.count,
            )
            for member, layer in enumerate(self.layout.groups[group])
        ]

    def ints(self, count: int) -> Any:
        """int32 numbers on the device."""
        return torch.zeros(count, dtype=torch.int32, device=self.lane.home)


def build_device_pools(
    layout: ModelLayout, sizes: PoolSizes, lane: DeviceLane, disk: DiskTier | Elsewhere | None
) -> DevicePools:
    if sizes.shared:
        raise Unavailable(
            f"shared pools lie on the host, so that other processes can map them; slots on "
            f"{lane.home} cannot be shared"
        )
    counts = Counts.of(layout, sizes)
    host_bytes = counts.host_pages * layout.host_page_bytes
    memory = pinned_memory(lane.device, host_bytes, row_bytes=layout.row_bytes)
    latent = LatentPool(layout, memory, poison=sizes.poison)
    maps = Maps(
        lane.home,
        line_count=sizes.sequence_max,
        page_max=div_ceil(sizes.length_max, PAGE_ROWS),
        page_count=counts.index_pages,
    )
    keys = DeviceKeys(layout, counts.index_pages, lane, poison=sizes.poison)
    index = DeviceIndex(keys, maps, host_page_count=counts.host_pages)
    tables = DeviceTables(maps)
    sparse = DeviceArenas(
        layout,
        lane.home,
        chunk_count=counts.chunks,
        row_id_count=counts.index_pages * PAGE_ROWS,
        poison=sizes.poison,
        is_scored=sizes.evict == "score",
    )
    return DevicePools(
        layout=layout,
        sizes=sizes,
        latent=latent,
        index=index,
        tables=tables,
        sparse=sparse,
        ledger=make_ledger(layout, latent, index, sparse),
        inflight=Pending(lane),
        shelf=None if disk is None else Shelf(latent, disk),
        lane=lane,
        queries=Queries(tables, keys, sizes.query_max),
        counting=Counting(lane, layout.group_count, sizes.sequence_max),
    )
