"""The slots of a layer beside the host's rows that they are copies of, compared on the device.

The comparison is queued on compute, behind all copies that are under way: then a slot whose row is
not newer than the host's must hold what the host holds. The host's rows come over the link in
pieces, and the device lists the slots that differ. So only a short list comes back, and the host
waits for it only when it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ess.door.device.memory.device_pools import DevicePools
from ess.door.device.memory.uploads import Download
from ess.door.side import DifferingSlots
from ess.kernels.streams import RowCopy
from ess.units import PAGE_ROWS

PIECE_ROWS: Final = 1 << 14
NO_ROW: Final = -1


@dataclass(frozen=True, slots=True)
class DeviceDiffering:
    """`numbers` are how many slots differ, then the slots that are listed, then their rows."""

    numbers: Download

    def read(self) -> DifferingSlots:
        count, *listed = self.numbers.read().tolist()
        most = len(listed) // 2
        pairs = zip(listed[:most], listed[most:], strict=True)
        return DifferingSlots(count, [pair for pair in pairs if pair[1] != NO_ROW])


def compare(pools: DevicePools, layer: int, *, most: int) -> DeviceDiffering:
    """Counts all slots that differ from their rows and lists at most `most` of them."""
    assert most > 0, "what differs is to be named"
    pools.lane.hold_for_copies()
    pools.tables.maps.flush()
    group, home = pools.layout.group_of(layer), pools.lane.home
    count = torch.zeros(1, dtype=torch.int64, device=home)
    listed = torch.full((2, most + 1), NO_ROW, dtype=torch.int32, device=home)
    for slots in torch.split(_slots(pools, group), PIECE_ROWS):
        rows = _copies(pools, slots)
        differs = _differs(pools, layer, slots, rows)
        place = torch.where(differs, count + differs.cumsum(0) - 1, most).clamp(max=most)
        for line, values in zip(listed, (slots, rows), strict=True):
            line.scatter_(0, place, values)
        count += differs.sum()
    numbers = torch.cat((count.to(torch.int32), listed[:, :most].reshape(-1)))
    return DeviceDiffering(Download(numbers))


def _slots(pools: DevicePools, group: int) -> Tensor:
    """Every slot of the group."""
    blocks = pools.sparse.arenas[group].blocks[: pools.sparse.slot_count(group) // PAGE_ROWS]
    places = torch.arange(PAGE_ROWS, dtype=torch.int32, device=pools.lane.home)
    slots: Tensor = (blocks.unsqueeze(1) + places).view(-1)
    return slots


def _copies(pools: DevicePools, slots: Tensor) -> Tensor:
    """The row of each slot that holds a copy."""
    rows = pools.sparse.row_of.index_select(0, slots)
    is_newer = pools.sparse.dirty.index_select(0, slots) != 0
    copies: Tensor = rows.masked_fill(is_newer, NO_ROW)
    return copies


def _differs(pools: DevicePools, layer: int, slots: Tensor, rows: Tensor) -> Tensor:
    """Which of these slots hold other bytes than their row; slots without a row do not count."""
    _, member = pools.layout.place_of(layer)
    held = pools.sparse.member_slab(member).index_select(0, slots)
    truth = torch.empty_like(held)
    copy = RowCopy(
        source=torch.from_numpy(pools.latent.rows[layer]),
        source_rows=_host_rows(pools, rows),
        target=truth,
    )
    pools.lane.mover.queue([copy], pools.lane.compute)
    differs: Tensor = (held != truth).any(dim=1) & (rows >= 0)
    return differs


def _host_rows(pools: DevicePools, rows: Tensor) -> Tensor:
    known = rows.clamp(min=0)
    pages = pools.tables.maps.host_page_of.index_select(0, known // PAGE_ROWS)
    host_rows = pages * PAGE_ROWS + known % PAGE_ROWS
    return torch.where(rows >= 0, host_rows, NO_ROW)
