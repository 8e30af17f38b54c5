"""The end of a step on a device: rejected rows leave their slots, kept rows are stored behind it.

    seal     one kernel on compute: what is rejected leaves its slot, lengths grow, keys are
             gathered, reports are counted; then, on the lane, the kept rows and keys go home
    settle   on compute, where the next step begins: the slots are as old as their host again
    learned  the host knows how many were kept; when the store has landed too, it marks the rows

Only the device knows how many rows are kept, so lists are as long as the step, and -1 stands for a
pair that is left out. Memory that the lane may still read is used in turn with other such memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ess.array_types import Bytes, Ints
from ess.door.device.memory.arenas import ints
from ess.door.device.memory.counting import STORED, WIDTH
from ess.door.device.memory.device_pools import DevicePools
from ess.door.device.memory.keys import WORD
from ess.door.device.memory.queries import DeviceArrays
from ess.door.device.memory.uploads import upload
from ess.door.steps.step import Step
from ess.errors import BadInput
from ess.flashtrans.mover import INT32_ROWS_MAX
from ess.kernels.cuda.pinned import pinned_memory
from ess.kernels.cuda.streams import CudaEvent
from ess.kernels.streams import RowCopy
from ess.pool.device_bytes import SEALS
from ess.pool.lru.cuda import Residency
from ess.pool.lru.cuda_seal import SealKernel
from ess.pool.lru.cuda_shape import REPORT
from ess.units import div_ceil


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
    """`selects` and `writes` are the reports of a step's calls, flat: [call, group, number] and
    [group, number]. `new_slots` [group, query] are those of its new rows."""

    def __init__(
        self, pools: DevicePools, *, new_slots: Tensor, selects: Tensor, writes: Tensor
    ) -> None:
        self._pools = pools
        self._layers_each = _layers_each(pools)
        rows = torch.from_numpy(pools.latent.rows)
        firsts = range(0, len(rows), self._layers_each)
        self._hosts = [rows[at : at + self._layers_each].flatten(0, 1) for at in firsts]
        self._places = [_place(pools) for _ in range(SEALS)]
        self._turn = 0
        self._unsettled: Unsettled | None = None
        self._kernel = SealKernel(
            pools.lane.device,
            **_arrays(pools),
            **_sizes(pools),
            layers_each=self._layers_each,
            new_slots=new_slots,
            slot_stride=new_slots.shape[1],
            selects=selects,
            writes=writes,
            select_count=selects.numel() // writes.numel(),
        )

    def seal(
        self,
        step: Step,
        arrays: DeviceArrays,
        accepted: Tensor,
        groups: Many[tuple[int, bool]],
    ) -> SealedStep:
        """`groups` have claimed; of each whether all of its layers have the new rows. Rows of the
        others all leave."""
        assert self._unsettled is None, f"{step!r}: the step before it was not settled"
        place, pools, count = self._take(), self._pools, arrays.new_count
        stored = _runs([group for group, is_whole in groups if is_whole])
        assert len(stored) < 2, f"groups {groups} are stored in two pieces"
        kept = stored[0] if stored else range(0)
        self._queue(place, arrays, accepted, [group for group, _ in groups], kept)
        pools.lane.follow(pools.lane.steps)
        if kept:
            self._unsettled = Unsettled(place, place.slots[: len(kept) * count])
            copies = [*self._rows(place, kept, count), *self._keys(place, count)]
            pools.lane.mover.queue(copies, pools.lane.steps.handle)
        place.event.record(pools.lane.steps.handle)
        sealed = SealedStep(pools, place, step, list(kept), count)
        pools.inflight.track(place.event, sealed.landed)
        pools.counting.send()
        return sealed

    def _take(self) -> SealPlace:
        """No step begins behind two that are not learned. So a place that is not free is that of a
        learned step: the host is ahead of the stores, and waits for that one."""
        place = self._places[self._turn]
        if not place.is_free:
            self._pools.inflight.settle_until(place.event)
        assert place.is_free, f"{SEALS} steps are sealed, and the oldest is not learned"
        self._turn = (self._turn + 1) % SEALS
        place.is_free = False
        return place

    def _queue(
        self,
        place: SealPlace,
        arrays: DeviceArrays,
        accepted: Tensor,
        groups: list[int],
        kept: range,
    ) -> None:
        """One launch where the groups are neighbours, as they are but for models that have several
        MTP modules. The first one adds to the lengths."""
        given = {name: getattr(arrays, name) for name in ("lines", "sequence_of")}
        given |= {"accepted": accepted, "offsets": arrays.query_offset, "rows": arrays.row_ids}
        given |= {name: getattr(place, name) for name in ("sources", "targets", "keys")}
        for number, run in enumerate(_runs(groups) or [range(0)]):
            self._kernel.queue(
                self._pools.lane.compute,
                count=arrays.new_count,
                sequence_count=0 if number else len(accepted),
                groups=run,
                stored=kept if kept and kept.start in run else range(0),
                kept=place.slots,
                told=place.accepted,
                **given,
            )

    def _rows(self, place: SealPlace, kept: range, count: int) -> Iterator[RowCopy]:
        """The kept rows of all layers of these groups. Slots of all members are rows of one slab;
        the host's rows of as many layers as 31 bits can name lie in one matrix, layer behind
        layer."""
        groups, each = self._pools.layout.groups, self._layers_each
        first, stop = groups[kept.start][0], groups[kept.stop - 1][-1] + 1
        for at in range(first // each, div_ceil(stop, each)):
            begin, end = max(at * each, first) - first, min((at + 1) * each, stop) - first
            yield RowCopy(
                source=self._pools.sparse.slab,
                source_rows=place.sources[begin * count : end * count],
                target=self._hosts[at],
                target_rows=place.targets[begin * count : end * count],
            )

    def _keys(self, place: SealPlace, count: int) -> list[RowCopy]:
        """All index keys of the new rows, side by side; the host puts them where they belong."""
        size = self._pools.index.keys.layer_count * count
        if not size:
            return []
        return [RowCopy(source=place.keys[:size], target=torch.from_numpy(place.host_keys)[:size])]

    def settle(self, residency: Residency) -> None:
        """Compute waits for the latest store; its slots may give way from here on. `residency` is
        of any group: whether slots are dirty is written over the whole slab."""
        if self._unsettled is None:
            return
        place, slots = self._unsettled
        compute = self._pools.lane.compute
        place.event.hold(compute)
        residency.settle(slots, stream=compute)
        self._unsettled = None


class Unsettled(NamedTuple):
    """The slots of kept rows, and -1."""

    place: SealPlace
    slots: Tensor


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
        self._whereabouts: tuple[Ints, Ints] | None = None
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
        if self._keyed:
            queries = np.array(self._keyed)[:, None] * self._query_count + places
            latent.keys.write(self._keyed, host_rows, self._place.host_keys[queries])
            latent.mark_keys(self._keyed, host_rows)
        for sequence in self._sequences:
            sequence.progress.publish()

    def _where(self, kept: list[int]) -> tuple[Ints, Ints]:
        """Numbers of the queries that were kept, and their host rows."""
        places, host_rows, first = list[int](), list[int](), 0
        for sequence, count, brought in zip(self._sequences, kept, self._query_counts, strict=True):
            places += range(first, first + count)
            new = range(sequence.length, sequence.length + count)
            host_rows += map(sequence.holding.host_row, new)
            first += brought
        return np.array(places, np.int32), np.array(host_rows, np.int32)


def _arrays(pools: DevicePools) -> dict[str, Any]:
    """The arrays that a seal reads and changes, in all steps."""
    sparse, maps, counting = pools.sparse, pools.tables.maps, pools.counting
    layout = pools.layout
    firsts = [*(group[0] for group in layout.groups), layout.layer_total]
    return {
        "slot_of": sparse.slot_of,
        "row_of": sparse.row_of,
        "rank_of": sparse.rank_of,
        "dirty": sparse.dirty,
        "lengths": maps.lengths,
        "host_page_of": maps.host_page_of,
        "first_layer": upload(np.array(firsts, np.int32), pools.lane.home),
        "key_pages": pools.index.keys.pages,
        "selected": counting.of("select"),
        "written": counting.of("write"),
        "left": counting.of("leave")[:, REPORT.index("left")],
        "stored": counting.of("leave")[:, STORED],
    }


def _layers_each(pools: DevicePools) -> int:
    """How many layers' rows on the host one list can name."""
    each: int = INT32_ROWS_MAX // pools.latent.rows.shape[1]
    return min(pools.layout.layer_total, each)


def _sizes(pools: DevicePools) -> dict[str, int]:
    keys, codec = pools.index.keys, pools.layout.index
    return {
        "row_id_count": pools.sparse.row_id_count,
        "host_row_count": pools.latent.rows.shape[1],
        "page_count": keys.page_count,
        "key_words": keys.key_bytes // WORD,
        "value_words": 0 if codec is None else codec.value_bytes // WORD,
        "group_total": pools.layout.group_count,
        "number_stride": WIDTH,
    }


def _place(pools: DevicePools) -> SealPlace:
    layout, count, home = pools.layout, pools.sizes.query_max, pools.lane.home
    shape = (pools.index.keys.layer_count * count, max(1, pools.index.keys.key_bytes))
    host_keys = pinned_memory(pools.lane.device, max(1, shape[0] * shape[1]), touch_threads=1)
    return SealPlace(
        slots=ints(home, -1, layout.group_count * count),
        sources=ints(home, -1, layout.layer_total * count),
        targets=ints(home, -1, layout.layer_total * count),
        keys=torch.zeros(shape, dtype=torch.uint8, device=home),
        host_keys=host_keys[: shape[0] * shape[1]].reshape(shape),
        accepted=torch.zeros(pools.sizes.sequence_max, dtype=torch.int32, pin_memory=True),
        event=CudaEvent(pools.lane.device),
    )


def _runs(groups: list[int]) -> list[range]:
    """Groups neighbouring numbers; the groups ascend."""
    breaks = [at for at in range(1, len(groups)) if groups[at] != groups[at - 1] + 1]
    bounds = zip([0, *breaks], [*breaks, len(groups)], strict=True)
    return [range(groups[begin], groups[stop - 1] + 1) for begin, stop in bounds if groups]
