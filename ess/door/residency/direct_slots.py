"""`Direct` over slots: native code locates and resolves by the records of their arenas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ess.kernels.cpu import native
from ess.kernels.cpu.layer import Find, Layers, Part
from ess.pool.lru import planner

if TYPE_CHECKING:
    from ess.door.memory.pools import HostPools
    from ess.door.residency.slots import Slots
    from ess.door.steps.step import Step
    from ess.kernels.streams import KnownMatrix


def bind_append(pools: HostPools, layers: Layers, layer: int, slab: KnownMatrix) -> None:
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
        self.tables = slots.pools.tables.lines
        self._bytes = slots.pools.at_once_max(waits=True)
        self._ranges: dict[range, range] = {}

    def bind(self, layers: Layers, which: range) -> None:
        pools, space = self._slots.pools, self._slots.workspaces[0]
        for layer in which:
            group, member = pools.layout.place_of(layer)
            assert len(pools.layout.groups[group]) == 1, f"layer {layer} shares its selection"
            record = layers.records[layer]
            record.split, record.lookup = planner.bound(space.split, space.of(group))
            record.host = native.address(pools.latent.layers[layer])
            bind_append(pools, layers, layer, pools.slabs[group][member])
            record.append.slots = self._slots.claim_at(group)

    def enter(self, step: Step, layers: Layers, which: range, *, resident: list[bool]) -> None:
        sparse, groups = self._slots.pools.sparse, self._groups(which)
        for group in (groups.start, groups.stop - 1):
            self._slots.claim(step, group)
        arguments = sparse.addresses(groups), tuple(resident)
        if layers.told.get(which) != arguments:
            layers.tell(which, arguments)
            layers.column("arena", which)[:] = arguments[0]
            layers.column("find", which)[:] = [Find.LOCATE if r else Find.RESOLVE for r in resident]
        if not all(resident):
            self._copy_at_once()
            tickets = [0 if is_resident else sparse.ticket() for is_resident in resident]
            layers.column("ticket", which)[:] = tickets

    def _copy_at_once(self) -> None:
        for lookup in self._slots.workspaces[0].lookups.values():
            planner.copy_at_once(lookup, self._bytes)

    def _groups(self, which: range) -> range:
        if which not in self._ranges:
            first = self._slots.pools.layout.group_of(which.start)
            self._ranges[which] = range(first, first + len(which))
        return self._ranges[which]

    def resolve(self, layers: Layers, layer: int) -> None:
        record = layers.records[layer]
        layers.told.clear()
        self._copy_at_once()
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

    def leave(self, step: Step, layers: Layers, which: range, *, claimed_count: int) -> None:
        slots, pools, groups = self._slots, self._slots.pools, self._groups(which)
        mine = slice(groups.start, groups.stop)
        slots.counters.found(mine, layers.column("hit_total", which))
        if claimed_count:
            columns = layers.column("claimed", which), layers.column("evicted_count", which)
            slots.counters.took(mine, *columns)
            slots.timings.took(which, layers.column("copied", which))
            pools.sparse.took(groups, *columns)
