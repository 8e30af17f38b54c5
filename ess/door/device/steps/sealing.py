"""The end of a step on a device: rejected rows are gone, kept ones leave for the host behind it.

    seal     on compute: what is rejected leaves its slot, lengths grow, keys are gathered; then, on
             the lane, the kept rows and keys go home
    settle   on compute, where the next step begins: the slots are as old as their host again
    learned  the host knows how many were kept; when the store has landed too, it marks the rows

How many rows are kept only the device knows, so lists are as long as the step, and a pair that is
left out is -1. What the lane still reads lies in places that take turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ess.door.device.memory.arenas import ints
from ess.door.device.memory.device_pools import DevicePools
from ess.door.device.memory.queries import DeviceArrays
from ess.door.step import Step
from ess.errors import BadInput
from ess.kernels.cuda.pinned import pinned_memory
from ess.kernels.cuda.streams import CudaEvent
from ess.kernels.streams import RowCopy
from ess.pool.device_bytes import SEALS
from ess.pool.lru.cuda import Residency
from ess.units import PAGE_ROWS

Numbers = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class SealPlace:
    """Room for one step's seal: the slots of its new rows, the store's lists, its keys."""

    slots: Tensor
    sources: Tensor
    targets: Tensor
    keys: Tensor
    host_keys: Bytes
    accepted: Tensor
    event: CudaEvent
    is_free: bool = True


class Sealing:
    def __init__(self, pools: DevicePools) -> None:
        self._pools = pools
        self._host = torch.from_numpy(pools.latent.rows.reshape(-1, pools.layout.row_bytes))
        self._places = [_place(pools) for _ in range(SEALS)]
        self._turn = 0
        self._unsettled: Unsettled | None = None

    def seal(
        self,
        step: Step,
        arrays: DeviceArrays,
        accepted: Tensor,
        groups: Many[tuple[int, bool]],
        new_slots: Tensor,
    ) -> SealedStep:
        """`groups` have claimed; of each whether all of its layers have the new rows."""
        assert self._unsettled is None, f"{step!r}: the step before it was not settled"
        place, pools = self._take(), self._pools
        count = arrays.new_count
        keep = accepted.index_select(0, arrays.sequence_of[:count]) > arrays.query_offset[:count]
        stored = self._leave_rejected(groups, arrays, keep, new_slots)
        pools.tables.maps.lengths.index_add_(0, arrays.lines, accepted)
        place.accepted[: len(step.sequences)].copy_(accepted, non_blocking=True)
        pools.lane.follow(pools.lane.steps)
        if stored:
            copies = self._stores(place, arrays, keep, slice(stored[0], stored[-1] + 1), new_slots)
            pools.lane.mover.queue(copies, pools.lane.steps.handle)
        place.event.record(pools.lane.steps.handle)
        made = SealedStep(pools, place, step, stored, count)
        pools.inflight.track(place.event, made.landed)
        pools.counting.send()
        return made

    def _leave_rejected(
        self, groups: Many[tuple[int, bool]], arrays: DeviceArrays, keep: Tensor, new_slots: Tensor
    ) -> list[int]:
        """The groups whose kept rows stay, to be stored; rows of the others all leave."""
        stored: list[int] = []
        for part, is_whole in _runs(groups):
            stays = keep if is_whole else torch.zeros_like(keep)
            self._leave(part, stays, arrays, new_slots)
            self._pools.counting.add_sealed(
                part, left=(~stays).sum(), stored=stays.sum() if is_whole else 0
            )
            if is_whole:
                assert not stored, f"groups {groups} are stored in two pieces"
                stored += range(part.start, part.stop)
        return stored

    def _take(self) -> SealPlace:
        place = self._places[self._turn]
        if not place.is_free:
            raise BadInput(f"{SEALS} steps are sealed and not stored: learn the oldest first")
        self._turn = (self._turn + 1) % SEALS
        place.is_free = False
        return place

    def _leave(self, groups: slice, keep: Tensor, arrays: DeviceArrays, new_slots: Tensor) -> None:
        """Rows that are not kept leave the slots that these groups have claimed for them."""
        sparse, rows = self._pools.sparse, arrays.row_ids[: arrays.new_count]
        slots = new_slots[groups, : arrays.new_count]
        named = sparse.slot_of[groups]
        named.index_copy_(1, rows.long(), torch.where(keep, slots, -1))
        flat, keeps = slots.reshape(-1).long(), keep.expand_as(slots).reshape(-1)
        every = rows.expand_as(slots).reshape(-1)
        sparse.row_of.index_copy_(0, flat, torch.where(keeps, every, -1))
        sparse.dirty.index_copy_(0, flat, keeps.to(torch.uint8))

    def _stores(
        self, place: SealPlace, arrays: DeviceArrays, keep: Tensor, groups: slice, new_slots: Tensor
    ) -> list[RowCopy]:
        """The kept rows of all layers of these groups in one copy: slots of all members are rows of
        one slab, and rows of all layers lie in one matrix behind one another."""
        pools, count = self._pools, arrays.new_count
        place.slots[groups, :count] = torch.where(keep, new_slots[groups, :count], -1)
        first, last = pools.layout.groups[groups.start][0], pools.layout.groups[groups.stop - 1][-1]
        owners, members, firsts = (part[first : last + 1] for part in pools.layer_lists)
        sources = new_slots[:, :count].index_select(0, owners) + members.unsqueeze(1)
        targets = firsts.unsqueeze(1) + self._host_rows(arrays)
        size = sources.numel()
        place.sources[:size] = torch.where(keep, sources, -1).reshape(-1)
        place.targets[:size] = torch.where(keep, targets, -1).reshape(-1)
        self._unsettled = Unsettled(place, groups, count)
        rows = RowCopy(
            source=pools.sparse.slab,
            source_rows=place.sources[:size],
            target=self._host,
            target_rows=place.targets[:size],
        )
        return [rows, *self._keys(place, arrays, count)]

    def _keys(self, place: SealPlace, arrays: DeviceArrays, count: int) -> list[RowCopy]:
        """All index keys of the new rows, side by side; the host puts them where they belong."""
        keys = self._pools.index.keys
        size = keys.layer_count * count
        if not size:
            return []
        place.keys[:size].view(keys.layer_count, count, -1).copy_(keys.read(arrays.row_ids[:count]))
        return [RowCopy(source=place.keys[:size], target=torch.from_numpy(place.host_keys)[:size])]

    def _host_rows(self, arrays: DeviceArrays) -> Tensor:
        maps, rows = self._pools.tables.maps, arrays.row_ids[: arrays.new_count]
        pages = torch.div(rows, PAGE_ROWS, rounding_mode="floor")
        host_rows: Tensor = maps.host_page_of.index_select(0, pages) * PAGE_ROWS + rows % PAGE_ROWS
        return host_rows

    def settle(self, residency: Residency) -> None:
        """Compute waits for the latest store; its slots may give way from here on. `residency` is
        of any group: whether slots are dirty is written over the whole slab."""
        if self._unsettled is None:
            return
        place, groups, count = self._unsettled
        compute = self._pools.lane.compute
        place.event.hold(compute)
        slots = place.slots[groups.start : groups.stop, :count].reshape(-1)
        residency.settle(slots, stream=compute)
        self._pools.lane.keep(slots, place.event)
        self._unsettled = None


class Unsettled(NamedTuple):
    place: SealPlace
    groups: slice
    query_count: int


class SealedStep:
    """One that the host has not heard of: landed and learned, in either order, it is over."""

    def __init__(
        self, pools: DevicePools, place: SealPlace, step: Step, groups: list[int], query_count: int
    ) -> None:
        self._pools = pools
        self._place = place
        self._sequences = step.sequences
        self._query_counts = step.query_counts
        self._query_count = query_count
        self._groups = groups
        self._keyed = sorted(step.keyed)
        self._whereabouts: tuple[Numbers, Numbers] | None = None
        self._kept: list[int] | None = None
        self._has_landed = False

    def landed(self) -> None:
        self._has_landed = True
        if self._kept is not None:
            self._finish(self._kept)

    def learned(self, kept: list[int]) -> None:
        """Before the lengths of the sequences have grown."""
        self._pools.counting.require_sound()
        if self._has_landed:
            self._require_same(kept)
        self._whereabouts = self._where(kept)
        self._kept = kept
        if self._has_landed:
            self._finish(kept)

    def _require_same(self, kept: list[int]) -> None:
        sealed = self._place.accepted[: len(kept)].tolist()
        if kept != sealed:
            raise BadInput(f"accepted is {kept}, this step was sealed with {sealed}")

    def _finish(self, kept: list[int]) -> None:
        """The rows are on the host, in all layers of the groups, and their keys."""
        self._require_same(kept)
        self._place.is_free = True
        if not self._groups or not any(kept):
            return
        pools, latent = self._pools, self._pools.latent
        layers = [layer for group in self._groups for layer in pools.layout.groups[group]]
        assert self._whereabouts is not None, "rows are marked when their positions are known"
        places, host_rows = self._whereabouts
        latent.mark_rows(layers, host_rows)
        keys = self._place.host_keys[: pools.index.keys.layer_count * self._query_count]
        for group in self._keyed:
            mine = keys[group * self._query_count :][places]
            latent.keys.write(group, host_rows, mine)
        latent.mark_keys(self._keyed, host_rows)
        for sequence in self._sequences:
            sequence.progress.publish()

    def _where(self, kept: list[int]) -> tuple[Numbers, Numbers]:
        """Numbers of the queries that were kept, and their host rows."""
        places, host_rows, first = [], [], 0
        for sequence, count, brought in zip(self._sequences, kept, self._query_counts, strict=True):
            places.append(np.arange(first, first + count, dtype=np.int32))
            host_rows.append(sequence.holding.host_rows(sequence.length, count))
            first += brought
        return np.concatenate(places), np.concatenate(host_rows)


def _place(pools: DevicePools) -> SealPlace:
    layout, count, home = pools.layout, pools.sizes.query_max, pools.lane.home
    shape = (pools.index.keys.layer_count * count, max(1, pools.index.keys.key_bytes))
    host_keys = pinned_memory(pools.lane.device, max(1, shape[0] * shape[1]), touch_threads=1)
    return SealPlace(
        slots=ints(home, -1, layout.group_count, count),
        sources=ints(home, -1, layout.layer_total * count),
        targets=ints(home, -1, layout.layer_total * count),
        keys=torch.zeros(shape, dtype=torch.uint8, device=home),
        host_keys=host_keys[: shape[0] * shape[1]].reshape(shape),
        accepted=torch.zeros(pools.sizes.sequence_max, dtype=torch.int32, pin_memory=True),
        event=CudaEvent(pools.lane.device),
    )


def _runs(groups: Many[tuple[int, bool]]) -> Iterator[tuple[slice, bool]]:
    """Neighbours of one kind together; the groups ascend."""
    first = 0
    for at in range(1, len(groups) + 1):
        here, before = groups[at : at + 1], groups[at - 1]
        if not here or here[0] != (before[0] + 1, before[1]):
            yield slice(groups[first][0], before[0] + 1), before[1]
            first = at
