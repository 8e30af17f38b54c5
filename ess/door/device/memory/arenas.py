"""The slots of a device: what the host knows of them, and the arrays that only kernels change.

The host owns the number of the step, the tickets, and which chunk belongs to which group. Only the
device knows which row is in which slot, and since when; the host has bounds for that, and counters
that reach it a step late.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ess.array_types import Counts, Ints, PageIds
from ess.door.device.memory.uploads import upload_into
from ess.layout import ModelLayout
from ess.pool.chunks import Chunks
from ess.pool.device_bytes import chunks_max
from ess.pool.lru.arena import AGE_MAX
from ess.pool.sparse import FIRST_STEP, LEAST_USE, NOW_MAX, POISON
from ess.units import PAGE_ROWS

TICKET_MAX: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceArena:
    """The arrays of one group, with the names of ess.pool.lru.arena."""

    slot_of: Tensor
    row_of: Tensor
    last_use: Tensor
    ticket_of: Tensor
    dirty: Tensor
    blocks: Tensor
    block_count: Tensor
    hit_age: Tensor
    rank_of: Tensor | None


class Drops(Protocol):
    def drop(self, active: PageIds) -> None: ...

    def clear(self, group: int, blocks: Ints) -> bool:
        """All rows leave these blocks, or none where a slot is held. It waits for the answer."""


class Ages(NamedTuple):
    """Each group's rows and hits by age, as of the host's latest look."""

    rows: Counts
    hits: Counts


class DeviceArenas:
    """The arenas of all groups over one slab, as their kernels and the host know them.

    `ticket` is the last one given before the open step; up to it all copies of steps have landed.
    `leaving` takes rows out of all groups; `DeviceSide` sets it.
    """

    def __init__(
        self,
        layout: ModelLayout,
        home: torch.device,
        *,
        chunk_count: int,
        row_id_count: int,
        poison: bool,
        is_scored: bool,
    ) -> None:
        self.layout = layout
        self.home = home
        self.step = FIRST_STEP
        self._passed = 0
        self.ticket = 0
        self.leaving: Drops | None = None
        self.row_id_count = row_id_count
        self.chunks = Chunks.of_one_size(layout, chunk_count, chunks_max(layout, chunk_count))
        slab_rows = chunk_count * layout.group_layers_max * PAGE_ROWS
        value = POISON if poison else 0
        shape = (slab_rows, layout.row_bytes)
        self.slab = torch.full(shape, value, dtype=torch.uint8, device=home)
        self.slot_of = ints(home, -1, layout.group_count, row_id_count)
        self.row_of = ints(home, -1, slab_rows)
        self.last_use = ints(home, 0, slab_rows)
        self.ticket_of = ints(home, 0, slab_rows)
        self.dirty = torch.zeros(slab_rows, dtype=torch.uint8, device=home)
        ranks = torch.zeros_like(self.slot_of, dtype=torch.int16) if is_scored else None
        self.rank_of = ranks
        """Bits of the specification's 16, without a sign; None where rows give way by lru."""
        ages = (layout.group_count, AGE_MAX + 1)
        self.hits = torch.zeros(ages, dtype=torch.int64, device=home)
        self._ages = Ages(*np.zeros((2, *ages), np.int64))
        self._blocks = [self.chunks.blocks(group) for group in range(layout.group_count)]
        self.arenas = [self._arena(group) for group in range(layout.group_count)]

    def _arena(self, group: int) -> DeviceArena:
        blocks, per_chunk = self._blocks[group], self.chunks.slots_each(group) // PAGE_ROWS
        room = torch.zeros(self.chunks.most(group) * per_chunk, dtype=torch.int32)
        room[: len(blocks)] = torch.from_numpy(blocks)
        return DeviceArena(
            slot_of=self.slot_of[group],
            row_of=self.row_of,
            last_use=self.last_use,
            ticket_of=self.ticket_of,
            dirty=self.dirty,
            blocks=room.to(self.home),
            block_count=torch.tensor([len(blocks)], dtype=torch.int32).to(self.home),
            hit_age=self.hits[group],
            rank_of=None if self.rank_of is None else self.rank_of[group],
        )

    # ---- what the host knows

    def begin_step(self) -> int:
        if self.now >= NOW_MAX:
            self._begin_anew()
        self.step += 1
        return self.step

    @property
    def now(self) -> int:
        """The number of the step in the slots' 32 bits: after `NOW_MAX` the numbers begin again."""
        return self.step - self._passed

    def _begin_anew(self) -> None:
        """All ages stay as they are. Every kernel that looks at them is queued on the stream that
        this is queued on."""
        by = self.now - FIRST_STEP
        self.last_use.sub_(by).clamp_(min=LEAST_USE)
        self._passed += by

    def drop_pages(self, active: PageIds) -> None:
        assert self.leaving is not None, "pages leave a device that has no kernels"
        if len(active):
            self.leaving.drop(active)

    def check(self) -> None:
        """The groups' arrays are audited by their kernels; here, that every group has a chunk."""
        self.chunks.check()

    def slot_count(self, group: int) -> int:
        return len(self._blocks[group]) * PAGE_ROWS

    @property
    def slot_count_min(self) -> int:
        return min(map(self.slot_count, range(self.layout.group_count)))

    @property
    def block_max(self) -> int:
        """The most blocks that any group may ever own."""
        return max(len(arena.blocks) for arena in self.arenas)

    def member_slab(self, member: int) -> Tensor:
        """The slab as the member-th layer of a group sees it: slot s is row s."""
        assert 0 <= member < self.layout.group_layers_max, f"no group has a member {member}"
        return self.slab[member * PAGE_ROWS :]

    # ---- budgets, for which the host reads what slots are used for

    def look(self) -> None:
        """Waits for the device, which counts: rows and ages of 40 GiB of slots are 0.5 GB."""
        rows = torch.stack([self._rows_by_age(group) for group in range(len(self.arenas))])
        self._ages = Ages(rows.cpu().numpy(), self.hits.cpu().numpy())

    def _rows_by_age(self, group: int) -> Tensor:
        """Rows in slots by the age that they will have in the next step."""
        blocks = self.arenas[group].blocks[: len(self._blocks[group]), None]
        slots = (blocks + torch.arange(PAGE_ROWS, device=self.home)).reshape(-1)
        ages = (self.now + 1 - self.last_use.index_select(0, slots)).clamp(max=AGE_MAX)
        ages = ages.where(self.row_of.index_select(0, slots) >= 0, AGE_MAX + 1)
        return torch.bincount(ages, minlength=AGE_MAX + 2)[: AGE_MAX + 1]

    def hit_age(self, group: int) -> Counts:
        """Hits found at each age, up to the latest look."""
        hits: Counts = self._ages.hits[group].copy()
        return hits

    def resident_age(self, group: int) -> Counts:
        """Rows in slots, at the latest look, by the age that they would have in the next step."""
        rows: Counts = self._ages.rows[group]
        return rows

    def move_chunks(self, source: int, target: int, count: int = 1) -> bool:
        """Give `target` `count` neighbouring chunks of `source`: the last that no step and no copy
        holds on to."""
        assert self.leaving is not None, "rows leave a device that has no kernels"
        for chunks in self.chunks.movable(source, target, count):
            if self.leaving.clear(source, self.chunks.blocks_in(chunks, source)):
                self.chunks.give(chunks, source, target)
                for group in (source, target):
                    self._tell_blocks(group)
                return True
        return False

    def _tell_blocks(self, group: int) -> None:
        """Writes the group's blocks where kernels queued from now on read them."""
        blocks, arena = self.chunks.blocks(group), self.arenas[group]
        assert len(blocks) <= len(arena.blocks), f"group {group} owns {len(blocks)} blocks"
        self._blocks[group] = blocks
        upload_into(arena.blocks[: len(blocks)], blocks)
        upload_into(arena.block_count, np.array([len(blocks)], np.int32))

    # ---- audits, which wait

    def slots(self, group: int) -> npt.NDArray[np.int64]:
        """Every slot of the group, ascending."""
        blocks = self._blocks[group].astype(np.int64)
        return (blocks[:, None] + np.arange(PAGE_ROWS)).reshape(-1)

    def used_count(self, group: int) -> int:
        return int((self.row_of.cpu().numpy()[self.slots(group)] >= 0).sum())


def ints(home: torch.device, value: int, *shape: int) -> Tensor:
    return torch.full(shape, value, dtype=torch.int32, device=home)
