"""The placement of a device: slots of the sparse pool there, absent rows fetched behind.

The host fixes the order of a step's calls, so the step can be captured. Kernels decide which rows
are hits, which are fetched into which slots and which are read in place; the host has only bounds.
Compute waits for a fetch when its `Resolution` is waited for, at the latest when its place in the
ring of claims is needed again or the step is sealed. The host waits only where it is several steps
ahead of the stores (`sealing`).

The first call of a step that needs them claims slots for its new rows in all groups of the main
model, as on the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Final, cast

import numpy as np
import torch
from torch import Tensor

from ess.array_types import RowIds
from ess.door.device.memory.arenas import TICKET_MAX
from ess.door.device.memory.device_pools import DevicePools
from ess.door.device.memory.queries import DeviceArrays
from ess.door.device.memory.uploads import upload_into
from ess.door.device.residency.knowledge import Knowledge
from ess.door.device.residency.landings import Landings
from ess.door.device.steps.answers import DeviceSplit, Recorded
from ess.door.device.steps.fetches import StepFetches
from ess.door.device.steps.locating import Locating
from ess.door.device.steps.new_slots import NewSlots
from ess.door.device.steps.sealing import Sealing
from ess.door.device.steps.stopwatch import Stopwatch
from ess.door.sequences.sequence import Sequence
from ess.door.stats import Timings
from ess.door.steps.arrays import Array, Kept
from ess.door.steps.placement import LayerMemory, Resolution
from ess.door.steps.step import Step
from ess.errors import BadState
from ess.kernels.streams import RowCopy
from ess.pool.device_bytes import PARTS_MAX, RING
from ess.pool.lru.cuda import Residency, forget_tickets
from ess.pool.lru.cuda_audit import FINDINGS
from ess.pool.lru.cuda_shape import REPORT, Moment, ResolveShape
from ess.pool.lru.cuda_workspaces import ResidencyWorkspaces, now_of
from ess.pool.warmup import WindowSet, last_windows, warm_set
from ess.units import PAGE_ROWS

CLAIMED: Final = REPORT.index("claimed")


class DeviceSlots:
    """`_fetches` owns the step's copies, `_new` the slots of its new rows."""

    def __init__(
        self,
        pools: DevicePools,
        landings: Landings,
        knowledge: Knowledge,
        timings: Timings,
        stopwatch: Stopwatch,
    ) -> None:
        layout, sizes, home = pools.layout, pools.sizes, pools.lane.home
        self.pools, self.knowledge = pools, knowledge
        self._landings, self._stopwatch = landings, stopwatch
        self._memory = [layer_memory(pools, layer) for layer in range(layout.layer_total)]
        self._works, self._selects = _selects(pools)
        self._splits = [
            DeviceSplit.create(sizes.query_max, layout.top_k, home) for _ in range(PARTS_MAX)
        ]
        self._rows = torch.empty((sizes.query_max, layout.top_k), dtype=torch.int32, device=home)
        self._fetches = StepFetches(pools, timings, stopwatch)
        self._new = NewSlots(pools, self._works.now)
        self._locating = Locating(pools, self._rows)
        self._sealing = Sealing(
            pools,
            new_slots=self._new.slots,
            selects=self._works.reports,
            writes=self._new.reports,
        )
        self._findings = pools.ints(FINDINGS)
        self._resolved = np.zeros(layout.group_count, np.int64)
        is_scored, row_ids = sizes.evict == "score", pools.sparse.slot_of.shape[1]
        self._scales = pools.ints(2 * sizes.query_max) if is_scored else None
        self._holders = pools.ints(2 * row_ids // PAGE_ROWS) if is_scored else None

    @property
    def direct(self) -> None:
        """None: layers run in graphs."""

    @property
    def new_rows_max(self) -> int:
        return self.pools.sparse.slot_count_min

    def memory(self, layer: int) -> LayerMemory:
        return self._memory[layer]

    # ---- a step

    def begin(self, step: Step) -> None:
        pools = self.pools
        assert not self._new.claimed, f"{step!r}: the step before it was not sealed"
        pools.lane.hold_for_keys()
        self._stopwatch.begin()
        self.settle()
        if max(pools.sparse.ticket, self._landings.ticket) > TICKET_MAX:
            self._landings.restart()
            forget_tickets(pools.lane.device, pools.sparse.ticket_of, stream=pools.lane.compute)
            pools.sparse.ticket = 0
        self._write_now(step.query_count)
        for works in (self._works, self._locating.works):
            works.begin(stream=pools.lane.compute)
        self._landings.new_rows = step.query_count

    def _write_now(self, query_count: int) -> None:
        sparse, behind = self.pools.sparse, self._landings.hold_for(query_count)
        moment = {"step": sparse.now, "ticket": sparse.ticket, "landed": sparse.ticket}
        scarce = bool((self.knowledge.room() < 0).any())
        for works, stamps in ((self._works, scarce), (self._locating.works, False)):
            now = now_of(**moment, behind=behind, query_count=query_count, stamps=stamps)
            upload_into(works.now, np.array(now, np.int32))

    def settle(self) -> None:
        """The slots of the latest step's rows are as old as the host, behind its store."""
        self._sealing.settle(self._selects[0])

    def append(self, step: Step, layer: int, queries: range, rows: Array, keys: Array) -> None:
        pools = self.pools
        group, member = pools.layout.place_of(layer)
        copy = RowCopy(
            source=rows,
            target=pools.sparse.member_slab(member),
            target_rows=self._new.of(group, queries),
        )
        pools.lane.mover.queue([copy], pools.lane.compute)
        if keys is not None:
            arrays = cast(DeviceArrays, step.arrays)
            pools.index.keys.write(group, arrays.key_places(), keys, first=queries.start)

    def places(self, step: Step, layer: int, queries: range) -> Tensor:
        return self._new.of(self.pools.layout.group_of(layer), queries)

    # ---- selections

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
        pools, layers = self.pools, self.pools.layout.groups[group]
        self._new.claim(group)
        moment = self._fetches.next_moment(part=workspace, first=queries.start)
        arrays = cast(DeviceArrays, step.arrays)
        mine = slice(queries.start, queries.stop)
        self._selects[group].plan(
            self._splits[workspace],
            self._rows[: len(selection)],
            stream=pools.lane.compute,
            moment=moment,
            positions=selection,
            page_table=pools.tables.maps.lines,
            table_row=arrays.query_line[mine],
            length=step.lengths(layers[0])[mine],
            host_page_of=pools.tables.maps.host_page_of,
        )
        self._resolved[group] += selection.numel()
        views = self._splits[workspace].views(len(selection))
        fetches = self._fetches.queue(group, self._selects[group], moment)
        return tuple(Resolution(*views, fetch=fetch) for fetch in fetches)

    def locate(self, step: Step, layer: int, queries: Many[int], selection: Array) -> Tensor:
        """Rows may be absent here, so the faults in this call's report do not count."""
        return self._located(self._locating.calls, step, layer, queries, selection, part=0)

    def locate_all(self, step: Step, layer: int, queries: range, selection: Array) -> Tensor | None:
        """The host knew that all rows are resident. Should a row be absent after all, the step's
        report has a fault, which the host reads when it learns this step."""
        return self._located(self._selects, step, layer, queries, selection, part=PARTS_MAX)

    def _located(
        self,
        calls: list[Residency],
        step: Step,
        layer: int,
        queries: Many[int] | Tensor,
        selection: Array,
        *,
        part: int,
    ) -> Tensor:
        group, fetches = self.pools.layout.group_of(layer), self._fetches
        self._new.claim(group)
        moment = Moment(copy=fetches.count + 1, waited=fetches.waited, part=part)
        return self._locating.slots(calls[group], moment, step, layer, queries, selection)

    def observe(
        self, step: Step, layer: int, queries: range, selection: Array, logits: Array
    ) -> None:
        pools, mine = self.pools, slice(queries.start, queries.stop)
        assert self._scales is not None, f"{step!r}: no scores are kept"
        self._selects[pools.layout.group_of(layer)].observe(
            selection,
            logits,
            scales=self._scales,
            holders=self._holders,
            stream=pools.lane.compute,
            moment=Moment(part=PARTS_MAX, first=queries.start),
            page_table=pools.tables.maps.lines,
            table_row=cast(DeviceArrays, step.arrays).query_line[mine],
            length=step.lengths(layer)[mine],
        )

    def host_codes(self, step: Step, layer: int, queries: range, selection: Array) -> Tensor:
        return self._locating.host_codes(step, layer, queries, selection)

    # ---- graphs

    def record(self, step: Step) -> Recorded:
        """Compute waits for all copies, so that what has been captured ends where it began."""
        self._fetches.hold_all()
        notes, calls = self._stopwatch.recorded(), tuple(self._new.calls)
        return Recorded(self._fetches.count, calls, self._resolved.copy(), notes)

    def replay(self, step: Step, recorded: object) -> None:
        """The kernels of a graph have done, or will do, what the recorded step's calls queued."""
        assert isinstance(recorded, Recorded), f"{step!r} replays {recorded!r}"
        assert not self._new.claimed, f"{step!r}: a step is replayed whole"
        self._fetches.replayed(recorded.copy_count)
        self._new.replayed(recorded.written)
        self._resolved += recorded.resolved
        self._stopwatch.replayed(recorded.notes)

    # ---- the end of a step

    def seal(self, step: Step, accepted: Kept) -> None:
        pools, appended = self.pools, step.appended
        self._fetches.hold_all()
        arrays = cast(DeviceArrays, step.arrays)
        groups = [
            (group, appended.issuperset(pools.layout.groups[group]))
            for group in sorted(self._new.claimed)
        ]
        self._count(step)
        arrays.seal = self._sealing.seal(step, arrays, arrays.on_device(accepted), groups)
        pools.sparse.ticket += 2 * self._fetches.count
        self._fetches.end()
        self._new.end()
        self._landings.new_rows = 0
        self._landings.go_on()

    def _count(self, step: Step) -> None:
        """Counts what the step's calls may claim at most; the seal adds up what they did claim.
        Calls that may meet absent rows are not counted."""
        shape = (-1, self.pools.layout.group_count, len(REPORT))
        self._stopwatch.seal(self._works.reports.view(shape)[:, :, CLAIMED])
        at_most = self._resolved + step.query_count
        self.pools.counting.claims(
            at_most, [each.number for each in step.sequences], new_rows=step.query_count
        )
        self._resolved[:] = 0

    # ---- ahead of selections

    def warm(self, sequence: Sequence, windows: Array) -> None:
        self.warm_from(sequence, map(last_windows, windows), windows.shape[1])

    def warm_from(self, sequence: Sequence, sets: Iterable[WindowSet], window_count: int) -> None:
        chosen = [warm_set(positions, last, window_count) for positions, last in sets]
        rows = [self.pools.tables.rows_of(sequence.line, each.positions) for each in chosen]
        self._require_stored(rows)
        for group, (mine, each) in enumerate(zip(rows, chosen, strict=True)):
            self._landings.warm(sequence, group, mine, each.ages)
        self._landings.go_on()

    def fill(self, sequence: Sequence, row_max: int | None) -> int:
        """How many rows are offered: the device knows which of them are absent, and takes those."""
        rows, layout = sequence.holding.row_ids(0, sequence.length), self.pools.layout
        for group in range(layout.group_count):
            stored = rows[self.pools.are_stored(group, rows)]
            self._landings.fill(sequence, group, stored, row_max=row_max)
        self._landings.go_on()
        return min(len(rows), len(rows) if row_max is None else row_max) * layout.group_count

    def _require_stored(self, rows: list[RowIds]) -> None:
        """All of these rows of each group, or BadState. Stores of steps are waited for."""
        are_stored = self.pools.are_stored
        if not all(are_stored(group, mine).all() for group, mine in enumerate(rows)):
            self.pools.inflight.drain()
        for group, mine in enumerate(rows):
            if missing := mine[~are_stored(group, mine)].tolist():
                raise BadState(
                    f"group {group}: {len(missing)} of {len(mine)} rows were never written to the"
                    f" host; the first has row id {missing[0]}"
                )

    def check(self) -> None:
        """Audits every group's arrays. It waits for the device."""
        self._fetches.check()
        count = self._fetches.count
        assert self._new.claimed or not count, f"{count} copies of a step that has claimed no slot"
        self._stopwatch.check()
        if not self._landings.new_rows:  # a step that has begun has written its own
            self._write_now(0)
        for residency in self._selects:
            residency.check(self._findings, stream=self.pools.lane.compute)


def _selects(pools: DevicePools) -> tuple[ResidencyWorkspaces, list[Residency]]:
    """The calls of each group. The last of their parts is for `locate_all`."""
    layout, sizes, device = pools.layout, pools.sizes, pools.lane.device
    shape = ResolveShape.of(
        query_max=sizes.query_max, top_k=layout.top_k, block_max=pools.sparse.block_max
    )
    works = ResidencyWorkspaces(
        device,
        shape,
        pools.ints,
        group_count=layout.group_count,
        part_max=PARTS_MAX + 1,
        ring=RING,
    )
    calls = [
        Residency(device, arena, works, group=group)
        for group, arena in enumerate(pools.sparse.arenas)
    ]
    return works, calls


def layer_memory(pools: DevicePools, layer: int) -> LayerMemory:
    (group, member), keys = pools.layout.place_of(layer), pools.index.keys.pages
    number = pools.layout.key_layer_of(group)
    return LayerMemory(
        slots=pools.sparse.member_slab(member),
        host=torch.from_numpy(pools.latent.rows[layer]),
        key_pages=keys[:0].reshape(0, 0) if number is None else keys[number],
    )
