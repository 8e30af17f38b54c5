"""`Direct` over slots: native code locates and resolves by the records of their arenas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ess.kernels.cpu import native
from ess.kernels.cpu.layer import Find, Layers, Part
from ess.pool.lru import planner

if TYPE_CHECKING:
    from ess.door.pools import HostPools
    from ess.door.residency.slots import Slots
    from ess.door.step import Step
    from ess.kernels.streams import Known

Counts = npt.NDArray[np.int64]


def bind_append(pools: HostPools, layers: Layers, layer: int, slab: Known) -> None:
    """Where new rows and keys of this layer go, but for their slots."""
    number = pools.layout.key_layer_of(pools.layout.group_of(layer))
    assert number is not None, f"layer {layer} has no index keys"
    pages, page_count, value_bytes, scale_bytes = pools.index.keys.side(number)
    append: Any = layers.records[layer].append
    append.slab, append.slot_count, append.row_bytes = slab.address, slab.row_count, slab.row_bytes
    append.pages, append.page_count = pages, page_count
    append.value_bytes, append.scale_bytes = value_bytes, scale_bytes


class DirectSlots:
    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def bind(self, layers: Layers, which: range) -> None:
        pools, space = self._slots.pools, self._slots.workspaces[0]
        for layer in which:
            group, member = pools.layout.place_of(layer)
            assert len(pools.layout.groups[group]) == 1, f"layer {layer} shares its selection"
            record = layers.records[layer]
            record.split, record.lookup = planner.bound(space.split, space.of(group))
            record.host = native.address(pools.latent.layers[layer])
            bind_append(pools, layers, layer, pools.slabs[group][member])

    def enter(self, step: Step, layers: Layers, which: range, *, resident: list[bool]) -> None:
        pools, space = self._slots.pools, self._slots.workspaces[0]
        groups = [pools.layout.group_of(layer) for layer in which]
        claimed = [self._slots.claim(step, group) for group in groups]
        for lookup in space.lookups.values():
            planner.copy_at_once(lookup, pools.at_once_max(waits=True))
        layers.column("append.slots", which)[:] = [native.address(slots) for slots in claimed]
        layers.column("arena", which)[:] = pools.sparse.addresses(groups)
        layers.column("find", which)[:] = [Find.LOCATE if r else Find.RESOLVE for r in resident]
        tickets = [0 if is_resident else pools.sparse.ticket() for is_resident in resident]
        layers.column("ticket", which)[:] = tickets

    def resolve(self, layers: Layers, layer: int) -> None:
        record = layers.records[layer]
        record.find, record.part = Find.RESOLVE, Part.FIND
        record.ticket = self._slots.pools.sparse.ticket()

    def settle(self, step: Step, layers: Layers, layer: int) -> None:
        slots, record = self._slots, layers.records[layer]
        space, group = slots.workspaces[0], slots.pools.layout.group_of(layer)
        lookup, split = space.of(group), space.split
        plan = slots.pools.sparse.resolved(
            group, lookup, split, ticket=record.ticket, claimed=record.claimed
        )
        record.claimed = record.hit_total = record.evicted_count = 0
        record.copied = (0, 0)
        for fetch in slots.started(plan, lookup, split, step.query_count):
            if fetch is not None:
                fetch.ask()
                fetch.wait()

    def leave(self, step: Step, layers: Layers, which: range) -> None:
        slots, pools = self._slots, self._slots.pools
        first = pools.layout.group_of(which.start)
        groups = slice(first, first + len(which))
        hits: Counts = layers.column("hit_total", which)
        claimed, evicted = layers.column("claimed", which), layers.column("evicted_count", which)
        asked = int(np.minimum(step.query_stop, pools.layout.top_k).sum())
        hits[layers.column("find", which) == Find.LOCATE] = asked
        slots.counters.took(groups, hits=hits, misses=claimed, evicted=evicted)
        slots.timings.took(which, layers.column("copied", which))
        for group, claims, gone in zip(
            range(groups.start, groups.stop), claimed.tolist(), evicted.tolist(), strict=True
        ):
            pools.sparse.took(group, claimed_count=claims, evicted_count=gone)
