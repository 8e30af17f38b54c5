"""The placement of a device: slots of the sparse pool there, absent rows fetched behind.

The host fixes the order of a step's calls, so the step can be captured. Kernels decide which rows
are hits, which are fetched into which slots and which are read in place; the host has only bounds.
Compute waits for a fetch when its `Resolution` is waited for, at the latest when its place in the
ring of claims is needed again or the step is sealed. The host never waits.

The first call of a step that needs them claims slots for its new rows in all groups of the main
model, as on the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Final, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ess.door.device.memory.arenas import TICKET_MAX
from ess.door.device.memory.device_pools import DevicePools
from ess.door.device.memory.maps import rows_of
from ess.door.device.memory.queries import DeviceArrays
from ess.door.device.memory.uploads import upload, upload_into
from ess.door.device.residency.knowledge import Knowledge
from ess.door.device.residency.landings import Landings
from ess.door.device.steps.answers import DeviceFetch, DeviceSplit, Recorded
from ess.door.device.steps.sealing import Sealing
from ess.door.device.steps.stopwatch import Stopwatch, TimedFetch
from ess.door.sequences.sequence import Sequence
from ess.door.stats import Timings
from ess.door.steps.arrays import Array, Kept
from ess.door.steps.placement import LayerMemory, Resolution
from ess.door.steps.step import Step
from ess.errors import BadState
from ess.flashtrans.mover import PreparedCopies
from ess.kernels.cuda.streams import CudaEvent
from ess.kernels.streams import RowCopy
from ess.pool.device_bytes import RING
from ess.pool.lru.cuda import Residency, forget_tickets
from ess.pool.lru.cuda_audit import FINDINGS
from ess.pool.lru.cuda_new_rows import NewRows
from ess.pool.lru.cuda_shape import REPORT, Moment, ResolveShape
from ess.pool.lru.cuda_workspaces import ResidencyWorkspaces, now_of
from ess.pool.warmup import WindowSet, last_windows, warm_set
from ess.units import PAGE_ROWS

Rows = npt.NDArray[np.int32]

CLAIMED: Final = REPORT.index("claimed")


class DeviceSlots:
    """`copy_count` copies of this step are queued; compute has waited for the first `waited`."""

    def __init__(
        self,
        pools: DevicePools,
        landings: Landings,
        knowledge: Knowledge,
        timings: Timings,
        stopwatch: Stopwatch,
    ) -> None:
        self.pools, self.knowledge = pools, knowledge
        self._timings, self._stopwatch = timings, stopwatch
        self._located_part = pools.sizes.part_max
        self._landings = landings
        self._memory = [layer_memory(pools, layer) for layer in range(pools.layout.layer_total)]
        self._make_selects()
        self._make_writes()
        self._make_locates()
        self._sealing = Sealing(
            pools,
            new_slots=self.new_slots,
            selects=self._works.reports,
            writes=self._writes.reports,
        )
        self._prepared: dict[tuple[int, int, int], list[PreparedCopies]] = {}
        self._events: dict[tuple[int, int], CudaEvent] = {}
        self._constants: dict[int, Tensor] = {}
        self._findings = pools.ints(FINDINGS)
        self._fetches: list[DeviceFetch] = []
        self._claimed: set[int] = set()
        self._written: list[range] = []
        self._copy_count = 0
        self._waited = 0
        self._resolved = np.zeros(pools.layout.group_count, np.int64)

    def _make_selects(self) -> None:
        pools, layout, sizes = self.pools, self.pools.layout, self.pools.sizes
        shape = ResolveShape.of(
            query_max=sizes.query_max, top_k=layout.top_k, block_max=pools.sparse.block_max
        )
        self._works = ResidencyWorkspaces(
            pools.lane.device,
            shape,
            pools.ints,
            group_count=layout.group_count,
            part_max=sizes.part_max + 1,
            ring=RING,
        )
        self._selects = [
            Residency(pools.lane.device, arena, self._works, group=group)
            for group, arena in enumerate(pools.sparse.arenas)
        ]
        home, width = pools.lane.home, layout.top_k
        self._splits = [
            DeviceSplit.create(sizes.query_max, width, home) for _ in range(sizes.part_max)
        ]
        self._rows = torch.empty((sizes.query_max, width), dtype=torch.int32, device=home)

    def _make_writes(self) -> None:
        """Makes the calls that find slots for new rows."""
        pools = self.pools
        self._writes = NewRows(
            pools.lane.device,
            pools.sparse.arenas,
            pools.queries.new_rows,
            self._works.now,
            ints=pools.ints,
            block_max=pools.sparse.block_max,
        )
        self.new_slots = self._writes.slots.view(pools.layout.group_count, -1)

    def _make_locates(self) -> None:
        """Makes the calls that locate rows which may be absent."""
        pools, layout, device = self.pools, self.pools.layout, self.pools.lane.device
        shape = ResolveShape.of(query_max=1, top_k=1, block_max=pools.sparse.block_max)
        self._locating = ResidencyWorkspaces(
            device, shape, pools.ints, group_count=layout.group_count, ring=1
        )
        self._locates = [
            Residency(device, arena, self._locating, group=group)
            for group, arena in enumerate(pools.sparse.arenas)
        ]

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
        assert not self._claimed, f"{step!r}: the step before it was not sealed"
        pools.lane.hold_for_keys()
        self._stopwatch.begin()
        self.settle()
        if pools.sparse.ticket > TICKET_MAX and self._landings.restart():
            forget_tickets(pools.lane.device, pools.sparse.ticket_of, stream=pools.lane.compute)
            pools.sparse.ticket = 0
        self._write_now(step.query_count)
        for works in (self._works, self._locating):
            works.begin(stream=pools.lane.compute)

    def _write_now(self, query_count: int) -> None:
        sparse, behind = self.pools.sparse, self._landings.hold_for(query_count)
        moment = {"step": sparse.now, "ticket": sparse.ticket, "landed": sparse.ticket}
        scarce = bool((self.knowledge.room() < 0).any())
        for works, stamps in ((self._works, scarce), (self._locating, False)):
            now = now_of(**moment, behind=behind, query_count=query_count, stamps=stamps)
            upload_into(works.now, np.array(now, np.int32))

    def settle(self) -> None:
        """The slots of the latest step's rows are as old as the host, behind its store."""
        self._sealing.settle(self._selects[0])

    def append(self, step: Step, layer: int, queries: range, rows: Array, keys: Array) -> None:
        pools, mine = self.pools, slice(queries.start, queries.stop)
        group, member = pools.layout.place_of(layer)
        self._claim(group)
        copy = RowCopy(
            source=rows,
            target=pools.sparse.member_slab(member),
            target_rows=self.new_slots[group, mine],
        )
        pools.lane.mover.queue([copy], pools.lane.compute)
        if keys is not None:
            arrays = cast(DeviceArrays, step.arrays)
            pools.index.keys.write(group, arrays.key_places(), keys, first=queries.start)

    def places(self, step: Step, layer: int, queries: range) -> Tensor:
        group = self.pools.layout.group_of(layer)
        self._claim(group)
        slots: Tensor = self.new_slots[group, queries.start : queries.stop]
        return slots

    def _claim(self, group: int) -> None:
        """Claims slots for the step's new rows in this group; all main groups are claimed
        together."""
        if group in self._claimed:
            return
        main = range(self.pools.layout.main_group_count)
        groups = main if group in main else range(group, group + 1)
        self._writes.claim(groups, stream=self.pools.lane.compute)
        self._claimed.update(groups)
        self._written.append(groups)

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
        self._claim(group)
        moment = self._next_moment(part=workspace, first=queries.start)
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
        fetches = self._fetch(group, layers, moment)
        return tuple(Resolution(*views, fetch=fetch) for fetch in fetches)

    def _next_moment(self, *, part: int, first: int) -> Moment:
        """The moment of the next copy. Its claims overwrite those of the copy `RING` before it,
        which compute waits for first."""
        copy = self._copy_count + 1
        if copy - RING > self._waited:
            self.hold(self._last_fetch(copy - RING))
        return Moment(copy=copy, waited=self._waited, part=part, first=first)

    def _last_fetch(self, copy: int) -> DeviceFetch:
        return next(fetch for fetch in self._fetches if fetch.copy == copy and fetch.is_last)

    def _fetch(
        self, group: int, layers: tuple[int, ...], moment: Moment
    ) -> tuple[DeviceFetch, ...]:
        lane = self.pools.lane
        self._copy_count = moment.copy
        lane.follow(lane.steps)
        fetches = []
        for layer, copies in zip(layers, self._copies(group, layers, moment), strict=True):
            event, is_last = self._event(layer, moment.part), layer == layers[-1]
            timed = self._timed(layer, is_ahead=layer != layers[0])
            lane.queue(copies, then=event)
            if timed is not None:
                timed.queued()
            fetches.append(DeviceFetch(self.hold, event, moment.copy, is_last, timed))
        self._fetches += fetches
        return tuple(fetches)

    def _timed(self, layer: int, *, is_ahead: bool) -> TimedFetch | None:
        """A fetch that starts now, in a step that is timed."""
        watch, lane = self._stopwatch, self.pools.lane.steps.handle
        if not watch.is_on:
            return None
        return TimedFetch(watch, self._timings, layer, lane, is_ahead=is_ahead)

    def _copies(self, group: int, layers: tuple[int, ...], moment: Moment) -> list[PreparedCopies]:
        """One for each layer; they name the same memory whenever this moment comes round."""
        key = group, moment.part, moment.copy % RING
        if key not in self._prepared:
            claims = self._selects[group].claims(moment)
            self._prepared[key] = [
                self.pools.lane.mover.prepare(
                    [
                        RowCopy(
                            source=self._memory[layer].host,
                            source_rows=claims.host_rows,
                            target=self.pools.sparse.member_slab(member),
                            target_rows=claims.slots,
                            count=claims.count,
                        )
                    ]
                )
                for member, layer in enumerate(layers)
            ]
        return self._prepared[key]

    def _event(self, layer: int, part: int) -> CudaEvent:
        if (layer, part) not in self._events:
            self._events[layer, part] = CudaEvent(self.pools.lane.device)
        return self._events[layer, part]

    def hold(self, fetch: DeviceFetch) -> None:
        """Compute waits for a layer's copy, and so for all before it; the host does not."""
        if fetch.copy <= self._waited:
            return
        if fetch.timed is None:
            fetch.event.hold(self.pools.lane.compute)
        else:
            fetch.timed.hold(fetch.event, self.pools.lane.compute)
        self._waited = fetch.copy if fetch.is_last else max(self._waited, fetch.copy - 1)

    def locate(self, step: Step, layer: int, queries: Many[int], selection: Array) -> Tensor:
        """Rows may be absent here, so the faults in this call's report do not count."""
        residency = self._locates[self.pools.layout.group_of(layer)]
        return self._located(residency, step, layer, queries, selection, part=0)

    def locate_all(self, step: Step, layer: int, queries: range, selection: Array) -> Tensor | None:
        """The host knew that all rows are resident. Should a row be absent after all, the step's
        report has a fault, which the host reads when it learns this step."""
        residency, part = self._selects[self.pools.layout.group_of(layer)], self._located_part
        return self._located(residency, step, layer, queries, selection, part=part)

    def _located(
        self,
        residency: Residency,
        step: Step,
        layer: int,
        queries: Many[int] | Tensor,
        selection: Array,
        *,
        part: int,
    ) -> Tensor:
        pools = self.pools
        self._claim(pools.layout.group_of(layer))
        lines, lengths = self._context(step, layer, queries)
        slots = torch.empty_like(selection)
        residency.locate(
            slots,
            self._rows[: len(selection)],
            stream=pools.lane.compute,
            moment=Moment(copy=self._copy_count + 1, waited=self._waited, part=part),
            query_count=self._constant(len(selection)),
            positions=selection,
            page_table=pools.tables.maps.lines,
            table_row=lines,
            length=lengths,
        )
        return slots

    def _context(
        self, step: Step, layer: int, queries: Many[int] | Tensor
    ) -> tuple[Tensor, Tensor]:
        """The line and the length of each of these queries."""
        lines, lengths = step.query_line, step.lengths(layer)
        if isinstance(queries, range):
            return lines[queries.start : queries.stop], lengths[queries.start : queries.stop]
        if not isinstance(queries, Tensor):
            queries = upload(np.array(queries, np.int32), self.pools.lane.home)
        return lines.index_select(0, queries), lengths.index_select(0, queries)

    def _constant(self, number: int) -> Tensor:
        """int32 [1] on the device."""
        if number not in self._constants:
            self._constants[number] = upload(np.array([number], np.int32), self.pools.lane.home)
        return self._constants[number]

    def observe(
        self, step: Step, layer: int, queries: range, selection: Array, logits: Array
    ) -> None:
        raise AssertionError("on a device rows give way by lru alone, and a step takes no scores")

    def host_codes(self, step: Step, layer: int, queries: range, selection: Array) -> Tensor:
        """-2 - host row, or the slot of a row that is newer than its host."""
        pools, group = self.pools, self.pools.layout.group_of(layer)
        lines, _ = self._context(step, layer, queries)
        chosen, maps = selection >= 0, pools.tables.maps
        every = lines.unsqueeze(1).expand_as(selection).reshape(-1)
        rows = rows_of(maps, every, selection.reshape(-1).clamp(min=0)).clamp(min=0)
        pages = maps.host_page_of.index_select(0, rows // PAGE_ROWS)
        host_rows = pages * PAGE_ROWS + rows % PAGE_ROWS
        slots = pools.sparse.slot_of[group].index_select(0, rows)
        newer = (slots >= 0) & (pools.sparse.dirty.index_select(0, slots.clamp(min=0)) != 0)
        codes = torch.where(newer, slots, -2 - host_rows).view_as(selection)
        return torch.where(chosen, codes, -1)

    # ---- graphs

    def record(self, step: Step) -> Recorded:
        """Compute waits for all copies, so that what has been captured ends where it began."""
        if self._fetches:
            self.hold(self._fetches[-1])
        assert self._waited == self._copy_count, f"{step!r}: a copy was not waited for"
        notes = self._stopwatch.recorded()
        return Recorded(self._copy_count, tuple(self._written), self._resolved.copy(), notes)

    def replay(self, step: Step, recorded: object) -> None:
        """The kernels of a graph have done, or will do, what the recorded step's calls queued."""
        assert isinstance(recorded, Recorded), f"{step!r} replays {recorded!r}"
        assert not self._claimed, f"{step!r}: a step is replayed whole"
        self._copy_count = self._waited = recorded.copy_count
        self._written += recorded.written
        self._claimed.update(group for groups in recorded.written for group in groups)
        self._resolved += recorded.resolved
        self._stopwatch.replayed(recorded.notes)

    # ---- the end of a step

    def seal(self, step: Step, accepted: Kept) -> None:
        pools = self.pools
        if self._fetches:
            self.hold(self._fetches[-1])
        arrays = cast(DeviceArrays, step.arrays)
        groups = [
            (group, step.appended.issuperset(pools.layout.groups[group]))
            for group in sorted(self._claimed)
        ]
        self._count(step)
        arrays.seal = self._sealing.seal(step, arrays, arrays.on_device(accepted), groups)
        pools.sparse.ticket += 2 * self._copy_count
        self._copy_count = self._waited = 0
        self._fetches.clear()
        self._claimed.clear()
        self._written.clear()

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
        groups = range(self.pools.layout.group_count)
        for group, (positions, last) in zip(groups, sets, strict=True):
            chosen = warm_set(positions, last, window_count)
            rows = self.pools.tables.rows_of(sequence.line, chosen.positions)
            self._require_stored(group, rows)
            self._landings.warm(sequence, group, rows, chosen.ages)
        self._landings.go_on()

    def fill(self, sequence: Sequence, row_max: int | None) -> int:
        """How many rows are offered: the device knows which of them are absent, and takes those."""
        rows, layout = sequence.holding.row_ids(0, sequence.length), self.pools.layout
        for group in range(layout.group_count):
            there = rows[self.pools.are_stored(group, rows)]
            self._landings.fill(sequence, group, there, row_max=row_max)
        self._landings.go_on()
        return min(len(rows), len(rows) if row_max is None else row_max) * layout.group_count

    def _require_stored(self, group: int, rows: Rows) -> None:
        are_stored = self.pools.are_stored(group, rows)
        if not are_stored.all():
            raise BadState(
                f"group {group}: {int((~are_stored).sum())} of {len(rows)} rows were never "
                f"written to the host; the first has row id {int(rows[~are_stored][0])}"
            )

    def check(self) -> None:
        """Audits every group's arrays. It waits for the device."""
        count = self._copy_count
        assert self._waited <= count, f"compute has waited for {self._waited} of {count} copies"
        assert self._claimed or not count, f"{count} copies of a step that has claimed no slot"
        self._stopwatch.check()
        if not self._claimed:
            self._write_now(0)
        for residency in self._selects:
            residency.check(self._findings, stream=self.pools.lane.compute)


def layer_memory(pools: DevicePools, layer: int) -> LayerMemory:
    (group, member), keys = pools.layout.place_of(layer), pools.index.keys.pages
    number = pools.layout.key_layer_of(group)
    return LayerMemory(
        slots=pools.sparse.member_slab(member),
        host=torch.from_numpy(pools.latent.rows[layer]),
        key_pages=keys[:0].reshape(0, 0) if number is None else keys[number],
    )
