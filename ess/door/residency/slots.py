"""The placement of this library: rows in slots of the sparse pool, absent ones fetched.

The first call of a step that needs them, append or resolve, claims the slots of its new rows in all
groups of the main model, before any selection can age-protect the whole arena: so any arena that
holds the new rows is enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ess.array_types import Bytes, Ints
from ess.door.memory.pools import HostPools
from ess.door.residency import row_copies
from ess.door.residency.direct_slots import DirectSlots
from ess.door.residency.seal_at_once import Sealing
from ess.door.sequences.sequence import Sequence
from ess.door.stats import Counters, TimedFetch, Timings
from ess.door.steps.arrays import Kept
from ess.door.steps.direct import Direct
from ess.door.steps.placement import LayerMemory, Resolution
from ess.door.steps.step import Step
from ess.errors import BadState
from ess.kernels.cpu import native
from ess.kernels.streams import Event
from ess.pool.device_bytes import PARTS_MAX
from ess.pool.index import IndexPool
from ess.pool.lru import planner
from ess.pool.lru.arena import FetchPlan, Lookup, Split
from ess.pool.warmup import WindowSet, last_windows, warm_set

Mask = npt.NDArray[np.bool_]
Scores = npt.NDArray[np.float32]
SplitViews: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


class Slots:
    """Between `begin` and `seal` it knows the slots of the step's new rows, by group, and the event
    of the latest fetch."""

    def __init__(self, pools: HostPools, counters: Counters, timings: Timings) -> None:
        self.pools = pools
        self.counters = counters
        self.timings = timings
        self._memory = [layer_memory(pools, layer) for layer in range(pools.layout.layer_total)]
        self.workspaces = [Workspace(pools) for _ in range(PARTS_MAX)]
        self._claimed: dict[int, Ints] = {}
        self._lines = np.empty((pools.layout.group_count, pools.sizes.query_max), np.int32)
        self._sealing = Sealing(pools)
        self._last_event: Event | None = None

    @property
    def direct(self) -> Direct | None:
        """None where a copy is never made at once, or scores are kept."""
        if not self.pools.at_once_bytes or self.pools.sizes.evict == "score":
            return None
        return DirectSlots(self)

    @property
    def new_rows_max(self) -> int:
        slot_counts, _ = self.pools.sparse.counts()
        return int(slot_counts.min())

    def memory(self, layer: int) -> LayerMemory:
        return self._memory[layer]

    def begin(self, step: Step) -> None:
        assert not self._claimed, f"{step!r}: the step before it was not sealed"
        assert self._last_event is None, f"{step!r}: a fetch of the step before it is under way"

    def append(
        self, step: Step, layer: int, queries: range, rows: Bytes, keys: Bytes | None
    ) -> None:
        group, member = self.pools.layout.place_of(layer)
        mine = slice(queries.start, queries.stop)
        row_copies.write_new(
            self.pools,
            group,
            step.row_ids[mine],
            keys,
            slab=self.pools.slabs[group][member],
            slots=self.claim(step, group)[mine],
            rows=rows,
        )

    def places(self, step: Step, layer: int, queries: range) -> Tensor:
        group = self.pools.layout.group_of(layer)
        return torch.from_numpy(self.claim(step, group)[queries.start : queries.stop])

    def claim(self, step: Step, group: int) -> Ints:
        """The slots of the step's new rows in this group; all main groups are claimed together."""
        if group not in self._claimed:
            assert step.state == "open", f"{step!r} claims slots for new rows"
            sparse, main = self.pools.sparse, range(self.pools.layout.main_group_count)
            groups = main if group in main else range(group, group + 1)
            if not step.row_count:
                self._claimed.update(dict.fromkeys(groups, np.empty(0, np.int32)))
                return self._claimed[group]
            lines = self._lines[groups.start : groups.stop, : step.row_count]
            count = sparse.claim_new(groups, step.row_ids, out=lines)
            if count < len(groups):
                self.pools.inflight.drain()
                count += sparse.claim_new(groups[count:], step.row_ids, out=lines[count:])
            assert count == len(groups), "landed slots are enough for the new rows"
            self._claimed.update(zip(groups, lines, strict=True))
        return self._claimed[group]

    def claim_at(self, group: int) -> int:
        """Where every step's slots of new rows in this group lie, in memory."""
        return native.address(self._lines[group])

    # ---- selections

    def resolve(
        self,
        step: Step,
        group: int,
        queries: range,
        selection: Ints,
        *,
        workspace: int,
        waits: bool,
    ) -> tuple[Resolution, ...]:
        pools, space = self.pools, self.workspaces[workspace]
        lookup, split, layers = space.of(group), space.split, pools.layout.groups[group]
        lines, lengths = _context(step, layers[0], queries)
        lookup.at_once_bytes = pools.at_once_max(waits=waits)
        if group not in self._claimed:
            rows = lookup.rows[: len(selection)]
            planner.translate(selection, lookup.lines, lines, lengths, out=rows)
            self.claim(step, group)  # the selection is right: nothing has changed if it was not
        plan = pools.sparse.resolve(group, lookup, selection, lines, lengths, split)
        fetches = self.started(plan, lookup, split, len(selection))
        views = space.views(len(selection))
        return tuple(Resolution(*views, fetch) for fetch in fetches)

    def started(
        self, plan: FetchPlan, lookup: Lookup, split: Split, query_count: int
    ) -> tuple[TimedFetch | None, ...]:
        """The fetch that each layer of the plan's group has to wait for; rows in place are named by
        host row."""
        if plan.place_count or lookup.unwritten_count:
            self._refuse_unwritten(plan, split, query_count)
            assert not lookup.unwritten_count, "a row never written is to be fetched"
        if plan.place_count:
            name_host_rows(split, query_count, self.pools.index)
        self.counters.planned(plan)
        return self._fetches(plan, lookup, self.pools.layout.groups[plan.group])

    def observe(
        self, step: Step, layer: int, queries: range, selection: Ints, logits: Scores
    ) -> None:
        lines, lengths = _context(step, layer, queries)
        group = self.pools.layout.group_of(layer)
        lookup = self.workspaces[0].of(group)
        self.pools.sparse.observe(group, lookup, selection, lines, lengths, logits)

    def _fetches(
        self, plan: FetchPlan, lookup: Lookup, layers: tuple[int, ...]
    ) -> tuple[TimedFetch | None, ...]:
        """The fetch that each layer of the group has to wait for."""
        if plan.is_landed:
            times = lookup.times[: len(layers) + 1].tolist()
            self.timings.copied(layers, list(pairwise(times)))
        if not plan.is_pending:
            return (None,) * len(layers)
        host_rows = lookup.host_rows[: len(plan.rows)]
        events = row_copies.start_fetch(self.pools, plan, host_rows)
        self._last_event = events[-1]
        settle = self.pools.inflight.settle_until
        return tuple(
            self.timings.fetch(layer, event, settle)
            for layer, event in zip(layers, events, strict=True)
        )

    def _refuse_unwritten(self, plan: FetchPlan, split: Split, query_count: int) -> None:
        """Rows that were never written cannot be fetched: their slots are free again."""
        place = split.place[:query_count]
        wanted = np.concatenate([plan.rows, place[place >= 0]]) if plan.place_count else plan.rows
        try:
            row_copies.check_stored(self.pools, plan.group, self.pools.index.host_rows(wanted))
        except BadState:
            self.pools.sparse.drop([plan.group], plan.rows)
            raise

    def locate(self, step: Step, layer: int, queries: Many[int], selection: Ints) -> Tensor:
        slots, _ = self._located(step, layer, queries, selection)
        return torch.from_numpy(slots)

    def locate_all(self, step: Step, layer: int, queries: range, selection: Ints) -> Tensor | None:
        slots, absent_count = self._located(step, layer, queries, selection)
        if absent_count:
            return None
        self.counters.located(self.pools.layout.group_of(layer), selection)
        return torch.from_numpy(slots)

    def _located(
        self, step: Step, layer: int, queries: Many[int], selection: Ints
    ) -> tuple[Ints, int]:
        """Slots, -1 where a row has none that has landed, and how many have none."""
        group = self.pools.layout.group_of(layer)
        lookup = self.workspaces[0].of(group)
        lines, lengths = _context(step, layer, queries)
        slots = np.empty_like(selection)
        if group not in self._claimed:
            planner.translate(selection, lookup.lines, lines, lengths, out=slots)
            self.claim(step, group)
        absent_count = self.pools.sparse.locate_into(
            slots, group, lookup, selection, lines, lengths
        )
        return slots, absent_count

    def host_codes(self, step: Step, layer: int, queries: range, selection: Ints) -> Tensor:
        """-2 - host row, or the slot of a row that is newer than its host.

        What attends these codes depends on no decision about residency.
        """
        pools, rows = self.pools, np.empty_like(selection)
        lines, lengths = _context(step, layer, queries)
        planner.translate(selection, pools.tables.lines, lines, lengths, out=rows)
        codes = np.full_like(rows, -1)
        chosen = rows >= 0
        codes[chosen] = -2 - pools.index.host_rows(rows[chosen])
        slots = pools.sparse.locate(pools.layout.group_of(layer), rows)
        newer = (slots >= 0) & pools.sparse.is_dirty(slots)
        codes[newer] = slots[newer]
        return torch.from_numpy(codes)

    # ---- the end of a step

    def record(self, step: Step) -> NoReturn:
        raise BadState(f"step {step.number} is on the host: there are no graphs to replay")

    def replay(self, step: Step, recorded: object) -> NoReturn:
        self.record(step)

    def seal(self, step: Step, accepted: Kept) -> None:
        pools = self.pools
        assert isinstance(accepted, list), "the host's step is sealed with numbers"
        if self._last_event is not None:
            pools.inflight.settle_until(self._last_event)
        layout, count, appended = pools.layout, sum(accepted), step.appended
        groups = [g for g in self._claimed if appended.issuperset(layout.groups[g])]
        others = [group for group in self._claimed if group not in groups]
        if not self._sealing.at_once(step, groups, accepted, self._lines):
            kept = step.arrays.row_offset < np.repeat(np.array(accepted, np.int32), step.row_counts)
            assert kept.sum() == count, f"{step!r} keeps {kept.sum()} rows, not {accepted}"
            self._store(step, groups, kept)
            self._drop(groups, step.row_ids[~kept])
        self._drop(others, step.row_ids)
        pools.latent.say()
        self.counters.stored(groups, count)
        self.timings.landed()
        self._claimed.clear()
        self._last_event = None

    def check(self) -> None:
        """Audit: each new row of the open step has its own claimed slot, which is dirty."""
        assert self._claimed or self._last_event is None, "a fetch of no step is waited for"
        for group, slots in self._claimed.items():
            assert len(np.unique(slots)) == len(slots), f"group {group}: a slot for two new rows"
            is_dirty = self.pools.sparse.is_dirty(slots)
            assert is_dirty.all(), (
                f"group {group}: slot {slots[~is_dirty][:1]} is as old as its host"
            )

    def _drop(self, groups: list[int], rows: Ints) -> None:
        if groups and len(rows):
            self.pools.sparse.drop(groups, rows)

    def _store(self, step: Step, groups: list[int], kept: Mask) -> None:
        """Sends the kept rows home; they are stored, and clean, when the copy has landed. Where
        other processes read them, that is waited for."""
        if not groups or not kept.any():
            return
        pools, rows, keyed = self.pools, step.row_ids[kept], sorted(step.keyed)
        slots_of = {group: self._claimed[group][kept] for group in groups}
        layers = [layer for group in groups for layer in pools.layout.groups[group]]
        to_host = pools.index.host_rows(rows)
        if keyed:
            pools.latent.copy_keys(pools.index.keys, rows, to_host, layers=keyed)

        def stored() -> None:
            pools.sparse.settle(np.concatenate(list(slots_of.values())))
            pools.latent.mark_rows(layers, to_host)
            for sequence in step.sequences:
                sequence.progress.publish()

        if pools.latent.writes:
            pools.inflight.submit(row_copies.store_copies(pools, slots_of, to_host), stored)
        else:
            pools.inflight.after(stored)
        if pools.latent.is_common:
            pools.inflight.drain()

    # ---- ahead of selections

    def warm(self, sequence: Sequence, windows: Ints) -> None:
        self.warm_from(sequence, map(last_windows, windows), windows.shape[1])

    def warm_from(self, sequence: Sequence, sets: Iterable[WindowSet], window_count: int) -> None:
        chosen = [warm_set(positions, last, window_count) for positions, last in sets]
        rows = [self.pools.tables.rows_of(sequence.line, each.positions) for each in chosen]
        for group, mine in enumerate(rows):
            absent = mine[self.pools.sparse.slot_of[group, mine] < 0]
            row_copies.check_stored(self.pools, group, self.pools.index.host_rows(absent))
        for group, (mine, each) in enumerate(zip(rows, chosen, strict=True)):
            self._start(self.pools.sparse.warm(group, mine, each.ages))

    def fill(self, sequence: Sequence, row_max: int | None) -> int:
        pools, started_count = self.pools, 0
        all_rows = sequence.holding.row_ids(0, sequence.length)
        for group in range(pools.layout.group_count):
            rows = all_rows[pools.layout.first_read(group, sequence.length) :]
            absent = rows[pools.sparse.slot_of[group, rows] < 0][:row_max]
            started_count += self._start(self.pools.sparse.fill(group, absent))
        return started_count

    def _start(self, plan: FetchPlan) -> int:
        """Puts the copies under way; rows that were never stored are refused."""
        assert not plan.is_landed, f"group {plan.group}: only selected rows are copied at once"
        host_rows = self.pools.index.host_rows(plan.rows)
        try:
            row_copies.check_stored(self.pools, plan.group, host_rows)
        except BadState:
            self.pools.sparse.drop([plan.group], plan.rows)
            raise
        row_copies.start_fetch(self.pools, plan, host_rows)
        self.counters.moved(plan)
        return len(plan.rows)


@dataclass(slots=True, eq=False, init=False)
class Workspace:
    """Where an answer lies: made once, used again for each part. The views are made anew when the
    number of queries changes. There is a lookup for each slab; what they work in they share."""

    lookups: dict[int, Lookup]
    split: Split
    _pools: HostPools
    _view_count: int
    _views: SplitViews | None

    def __init__(self, pools: HostPools) -> None:
        query_max, top_k = pools.sizes.query_max, pools.layout.top_k
        self._view_count, self._views, self._pools = 0, None, pools
        self.split = Split.create(query_count=query_max, top_k=top_k)
        rows = np.empty((query_max, top_k), np.int32)
        host_rows = np.empty(query_max * top_k, np.int32)
        times = np.zeros(pools.layout.group_layers_max + 1, np.int64)
        self.lookups = {
            size: Lookup(
                lines=pools.tables.lines,
                host_page_of=pools.index.host_page_of,
                stored=pools.latent.stored,
                rows=rows,
                host_rows=host_rows,
                host=pools.latent.layers,
                slab=pools.sparse.slots_of(pools.layout.size_groups(size)[0]),
                times=times,
            )
            for size in pools.layout.row_sizes
        }

    def of(self, group: int) -> Lookup:
        return self.lookups[self._pools.layout.group_row(group).row_bytes]

    def views(self, query_count: int) -> SplitViews:
        """hit, miss, place, slots and the counts of the first three, of the first queries."""
        if self._views is None or self._view_count != query_count:
            split = self.split
            assert 0 < query_count <= len(split.slots), (
                f"{query_count} queries, {split.slots.shape}"
            )
            hit, miss, place, slots, hit_count, miss_count, place_count = (
                torch.from_numpy(array[:query_count])
                for array in (
                    *(split.hit, split.miss, split.place, split.slots),
                    *(split.hit_count, split.miss_count, split.place_count),
                )
            )
            self._views = hit, miss, place, slots, hit_count, miss_count, place_count
            self._view_count = query_count
        return self._views


def layer_memory(pools: HostPools, layer: int) -> LayerMemory:
    (group, member), keys = pools.layout.place_of(layer), pools.index.keys.pages
    number = pools.layout.key_layer_of(group)
    return LayerMemory(
        slots=torch.from_numpy(pools.sparse.slots_of(group, member)),
        host=torch.from_numpy(pools.latent.layers[layer]),
        key_pages=torch.from_numpy(keys[:0].reshape(0, 0) if number is None else keys[number]),
    )


def name_host_rows(split: Split, query_count: int, index: IndexPool) -> None:
    """Rows served in place leave the planner as row ids; the caller reads them by host row."""
    place = split.place[:query_count]
    placed = place >= 0
    place[placed] = index.host_rows(place[placed])
    slots = split.slots[:query_count]
    coded = slots < -1
    slots[coded] = -2 - index.host_rows(-2 - slots[coded])


def _context(step: Step, layer: int, queries: Many[int]) -> tuple[Ints, Ints]:
    """The line and the length of each of these queries; neighbours are not copied."""
    if isinstance(queries, range):
        part = slice(queries.start, queries.stop)
        return step.query_line[part], step.lengths(layer)[part]
    numbers = np.array(queries, np.int32)
    return step.query_line[numbers], step.lengths(layer)[numbers]
