"""The baseline: an engine without residency, every row of every layer where attention reads it.

It does what any paged engine does, with our model and kernels, so that a difference in time is the
cost of residency: rows lie by page, a selection becomes addresses through the page table, and a
step ends by counting what was accepted. It has no slots, plan, copy lane or deferred stores. The
host keeps prefilled rows, for a prefix that comes again; decode does not touch them.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from ess.door import LayerMemory, Resolution, Sequence, Step
from ess.door.memory.pools import HostPools
from ess.door.residency.direct_slots import bind_append
from ess.door.residency.row_copies import write_new
from ess.door.residency.slots import Slots, layer_memory
from ess.door.steps.direct import Direct
from ess.door.steps.placement import Array, Kept
from ess.errors import BadState
from ess.flashtrans.views import known
from ess.kernels.cpu import native
from ess.kernels.cpu.layer import Find, Layers
from ess.kernels.streams import KnownMatrix
from ess.pool.lru import planner
from ess.pool.warmup import WindowSet
from ess.units import PAGE_ROWS


class EveryRow:
    """A row's id is its address. A sequence's rows are copied from the host when its first step
    begins; it must not be preempted, because the host never gets the rows of decode."""

    def __init__(self, slots: Slots) -> None:
        pools = self._pools = slots.pools
        self._slots = slots
        layout = pools.layout
        shape = layout.layer_total, pools.index.pages.page_count * PAGE_ROWS, layout.row_bytes
        self._rows = torch.zeros(shape, dtype=torch.uint8)
        self._slabs = [known(rows.numpy()) for rows in self._rows]
        on_host = [layer_memory(pools, layer) for layer in range(layout.layer_total)]
        self._memory = [
            LayerMemory(slots=rows, host=memory.host, key_pages=memory.key_pages)
            for rows, memory in zip(self._rows, on_host, strict=True)
        ]
        self._begun: set[int] = set()

    @property
    def direct(self) -> Direct | None:
        return _DirectRows(self._pools, self._slots, self._slabs)

    @property
    def new_rows_max(self) -> int:
        return self._pools.sizes.query_max

    def memory(self, layer: int) -> LayerMemory:
        return self._memory[layer]

    def begin(self, step: Step) -> None:
        for sequence in step.sequences:
            if sequence.number not in self._begun:
                self._begun.add(sequence.number)
                self._enter(sequence)

    def _enter(self, sequence: Sequence) -> None:
        active = sequence.active_rows(0, sequence.length).long()
        on_host = sequence.host_rows(0, sequence.length).long()
        for memory in self._memory:
            memory.slots[active] = memory.host[on_host]

    def append(self, step: Step, layer: int, queries: range, rows: Array, keys: Array) -> None:
        ids, group = step.row_ids[queries.start : queries.stop], self._pools.layout.group_of(layer)
        write_new(self._pools, group, ids, keys, slab=self._slabs[layer], slots=ids, rows=rows)

    def places(self, step: Step, layer: int, queries: range) -> Tensor:
        return torch.from_numpy(step.row_ids[queries.start : queries.stop])

    def record(self, step: Step) -> NoReturn:
        raise BadState("a baseline on the host is not captured")

    def replay(self, step: Step, recorded: object) -> NoReturn:
        self.record(step)

    def resolve(
        self,
        step: Step,
        group: int,
        queries: range,
        selection: Array,
        *,
        workspace: int,
        waits: bool,
    ) -> tuple[Resolution, ...]:
        """Every row is a hit."""
        layers = self._pools.layout.groups[group]
        rows = self.locate(step, layers[0], queries, selection)
        absent, none = torch.full_like(rows, -1), torch.zeros(len(rows), dtype=torch.int32)
        hits = (rows >= 0).sum(dim=1, dtype=torch.int32)
        return (Resolution(rows, absent, absent, rows, hits, none, none),) * len(layers)

    def observe(
        self, step: Step, layer: int, queries: range, selection: Array, logits: Array
    ) -> None:
        """Does nothing: no row ever gives way."""

    def locate(self, step: Step, layer: int, queries: Many[int], selection: Array) -> Tensor:
        rows, chosen = np.empty_like(selection), np.array(queries, np.int32)
        lines, lengths = step.query_line[chosen], step.lengths(layer)[chosen]
        planner.translate(selection, self._pools.tables.lines, lines, lengths, out=rows)
        return torch.from_numpy(rows)

    def locate_all(self, step: Step, layer: int, queries: range, selection: Array) -> Tensor:
        return self.locate(step, layer, queries, selection)

    def host_codes(self, step: Step, layer: int, queries: range, selection: Array) -> Tensor:
        return self.locate(step, layer, queries, selection)

    def seal(self, step: Step, accepted: Kept) -> None:
        """Rows that were not accepted lie behind the length, where the next ones go."""

    def warm(self, sequence: Sequence, windows: Array) -> None:
        """Does nothing: no row is ever absent."""

    def warm_from(self, sequence: Sequence, sets: Iterable[WindowSet], window_count: int) -> None:
        """Does nothing, like `warm`."""

    def fill(self, sequence: Sequence, row_max: int | None) -> int:
        return 0


class _DirectRows:
    """`Direct` by address."""

    def __init__(self, pools: HostPools, slots: Slots, slabs: Many[KnownMatrix]) -> None:
        self._pools = pools
        self._space = slots.workspaces[0]
        self._slabs = slabs
        self.tables = pools.tables.lines

    def bind(self, layers: Layers, which: range) -> None:
        for layer in which:
            record = layers.records[layer]
            lookup = self._space.of(self._pools.layout.group_of(layer))
            _, record.lookup = planner.bound(self._space.split, lookup)
            record.find = Find.ADDRESS
            bind_append(self._pools, layers, layer, self._slabs[layer])

    def enter(self, step: Step, layers: Layers, which: range, *, resident: list[bool]) -> None:
        layers.column("append.slots", which)[:] = native.address(step.row_ids)

    def resolve(self, layers: Layers, layer: int) -> NoReturn:
        raise BadState(f"layer {layer}: a row without an address")

    def settle(self, step: Step, layers: Layers, layer: int) -> NoReturn:
        raise BadState(f"layer {layer}: a fetch of a row that is here")

    def leave(self, step: Step, layers: Layers, which: range, *, claimed_count: int) -> None:
        """Does nothing: no row has moved."""
