"""The slots of a device: what the host knows of them, and the arrays that only kernels change.

The host owns which chunk belongs to which group, the number of the step and the tickets. Which row
is where, since when and for how long is the device's alone: the host has bounds and, behind,
counters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ess.layout import ModelLayout
from ess.pool.lru.arena import AGE_MAX
from ess.pool.pages import PageIds
from ess.pool.sparse import FIRST_STEP, POISON, chunk_blocks, even_owners
from ess.units import PAGE_ROWS

Ints = npt.NDArray[np.int32]

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


class Drops(Protocol):
    def drop(self, active: PageIds) -> None: ...


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
    ) -> None:
        self.layout = layout
        self.home = home
        self.step = FIRST_STEP
        self.ticket = 0
        self.leaving: Drops | None = None
        self.row_id_count = row_id_count
        self._owner_of = even_owners(layout, chunk_count)
        slab_rows = chunk_count * layout.group_layers_max * PAGE_ROWS
        value = POISON if poison else 0
        shape = (slab_rows, layout.row_bytes)
        self.slab = torch.full(shape, value, dtype=torch.uint8, device=home)
        self.slot_of = ints(home, -1, layout.group_count, row_id_count)
        self.row_of = ints(home, -1, slab_rows)
        self.last_use = ints(home, 0, slab_rows)
        self.ticket_of = ints(home, 0, slab_rows)
        self.dirty = torch.zeros(slab_rows, dtype=torch.uint8, device=home)
        ages = (layout.group_count, AGE_MAX + 1)
        self.hit_age = torch.zeros(ages, dtype=torch.int64, device=home)
        self._blocks = [self._listed(group) for group in range(layout.group_count)]
        self.arenas = [self._arena(group) for group in range(layout.group_count)]

    def _listed(self, group: int) -> Ints:
        chunks = np.flatnonzero(self._owner_of == group)
        assert chunks.size, f"group {group} owns no chunk, so it has no slot"
        return np.concatenate([chunk_blocks(self.layout, group, c) for c in chunks.tolist()])

    def _arena(self, group: int) -> DeviceArena:
        blocks = self._blocks[group]
        return DeviceArena(
            slot_of=self.slot_of[group],
            row_of=self.row_of,
            last_use=self.last_use,
            ticket_of=self.ticket_of,
            dirty=self.dirty,
            blocks=torch.from_numpy(blocks).to(self.home),
            block_count=torch.tensor([len(blocks)], dtype=torch.int32).to(self.home),
            hit_age=self.hit_age[group],
        )

    # ---- what the host knows

    def begin_step(self) -> int:
        self.step += 1
        return self.step

    def drop_pages(self, active: PageIds) -> None:
        assert self.leaving is not None, "pages leave a device that has no kernels"
        if len(active):
            self.leaving.drop(active)

    def check(self) -> None:
        """The groups' arrays are audited by their kernels; here, that every group has a chunk."""
        owners = set(self._owner_of.tolist())
        assert owners == set(range(self.layout.group_count)), f"chunks are of groups {owners}"

    def slot_count(self, group: int) -> int:
        return len(self._blocks[group]) * PAGE_ROWS

    @property
    def slot_count_min(self) -> int:
        return min(map(self.slot_count, range(self.layout.group_count)))

    @property
    def block_max(self) -> int:
        """The most blocks that any group may ever own, as budgets stand."""
        return max(map(len, self._blocks))

    def member_slab(self, member: int) -> Tensor:
        """The slab as the member-th layer of a group sees it: slot s is row s."""
        assert 0 <= member < self.layout.group_layers_max, f"no group has a member {member}"
        return self.slab[member * PAGE_ROWS :]

    # ---- audits, which wait

    def slots(self, group: int) -> npt.NDArray[np.int64]:
        """Every slot of the group, ascending."""
        blocks = self._blocks[group].astype(np.int64)
        return (blocks[:, None] + np.arange(PAGE_ROWS)).reshape(-1)

    def copies(self, group: int) -> tuple[Ints, Ints]:
        """Slots that must hold what the host holds, and their rows, when nothing is under way."""
        slots = self.slots(group)
        row_of, dirty = self.row_of.cpu().numpy(), self.dirty.cpu().numpy()
        slots = slots[(row_of[slots] >= 0) & (dirty[slots] == 0)].astype(np.int32)
        return slots, row_of[slots]

    def used_count(self, group: int) -> int:
        return int((self.row_of.cpu().numpy()[self.slots(group)] >= 0).sum())


def ints(home: torch.device, value: int, *shape: int) -> Tensor:
    return torch.full(shape, value, dtype=torch.int32, device=home)
