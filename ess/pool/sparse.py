"""The sparse pool: one slab of slots on the device, copies of rows, never the truth.

The slab is cut into chunks, which belong to layer groups (`ess.pool.chunks`). A slot of a group of
m layers is m rows of the slab, 64 apart, so that slot s of the group's first layer is row s, and
layer j of the group finds its copy at s + 64 * j. Budgets move by evicting a chunk and changing its
owner.

Planning claims. `plan` publishes row -> slot at once, marked with the ticket of the copy that will
bring the row; until `commit` the row is in flight: a miss for every plan that selects it, but never
a second fetch. What makes this safe:

* a victim is never selected in this step (age 0), dirty or in flight, so no copy writes where an
  attention of this step reads, and no unsaved row is lost;
* a dirty row stays until its store has landed, so the host copy it would be fetched from is whole;
* ids of released pages leave every group (`drop_pages`) before they can be used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ess.array_types import Bytes, Counts, PageIds, RowIds, SlotIds
from ess.layout import ModelLayout
from ess.pool.capacity import even_slabs
from ess.pool.chunks import Chunks
from ess.pool.index import page_rows
from ess.pool.lru import planner
from ess.pool.lru.arena import AGE_MAX, Arena, FetchPlan, Lookup, Split, make_scratch
from ess.pool.lru.eviction import Evictions, PolicyName
from ess.pool.slot_counts import SlotCounts
from ess.units import PAGE_ROWS

POISON: Final = 0xFF
FIRST_STEP: Final = 256
LEAST_USE: Final = FIRST_STEP - AGE_MAX
NOW_MAX: Final = 1 << 30
TICKET_MAX: Final = 1 << 30


class SparsePool:
    """Owns the slots: which row is in which slot, when it was last used, and what is under way."""

    def __init__(
        self,
        layout: ModelLayout,
        memory: Bytes,
        *,
        row_id_count: int,
        poison: bool = False,
        evict: PolicyName = "lru",
        slots_each: int | None = None,
    ) -> None:
        self.layout = layout
        self.evict = evict
        self._poison = poison
        slabs = even_slabs(layout, len(memory), slots_each)
        assert slabs, f"{len(memory)} bytes for {layout.group_count} groups"
        self.chunks = Chunks(layout, slabs)
        memory = memory[: slabs[-1].byte_end]
        self._views = [memory[: slab.byte_end].reshape(-1, slab.row_bytes) for slab in slabs]
        slab_rows = slabs[-1].stop
        if poison:
            memory.fill(POISON)
        self.slot_of = np.full((layout.group_count, row_id_count), -1, np.int32)
        self._row_of = np.full(slab_rows, -1, np.int32)
        self._last_use = np.zeros(slab_rows, np.int32)
        self._ticket_of = np.zeros(slab_rows, np.int32)
        self._dirty = np.zeros(slab_rows, np.uint8)
        self._scratch = make_scratch(slab_rows)
        self._evictions = Evictions(evict, slot_count=slab_rows, row_count=row_id_count)
        self._arenas = [self._arena(group) for group in range(layout.group_count)]
        self._counts = SlotCounts(layout, self._counted_slots())
        self.step = FIRST_STEP
        self._passed = 0
        self._ticket = 0

    def _arena(self, group: int) -> Arena:
        return Arena(
            slot_of=self.slot_of[group],
            row_of=self._row_of,
            last_use=self._last_use,
            ticket_of=self._ticket_of,
            dirty=self._dirty,
            blocks=self.chunks.blocks(group),
            hit_age=np.zeros(256, np.int64),
            scratch=self._scratch,
            group=group,
            eviction=self._evictions.group(),
        )

    # ---- what others may read

    def _counted_slots(self) -> Counts:
        return np.array([len(arena.blocks) * PAGE_ROWS for arena in self._arenas], np.int64)

    def slot_count(self, group: int) -> int:
        return int(self._counts.total[group])

    def used_count(self, group: int) -> int:
        return int(self._counts.used[group])

    def counts(self) -> tuple[Counts, Counts]:
        """Slots of each group, and how many of them are used."""
        return self._counts.total, self._counts.used

    @property
    def departed_count(self) -> int:
        """`SlotCounts` says which rows count."""
        return self._counts.departed_count

    @property
    def window_departed_count(self) -> int:
        return self._counts.window_departed_count

    def hit_age(self, group: int) -> npt.NDArray[np.int64]:
        """How many hits had each age since the start: the miss-ratio curve of exact batch LRU."""
        return self._arenas[group].hit_age.copy()

    def resident_age(self, group: int) -> npt.NDArray[np.int64]:
        """How many rows in slots will have each age in the next step."""
        slots = self._arenas[group].slots
        last_use = self._last_use[slots[self._row_of[slots] >= 0]]
        assert last_use.size == self.used_count(group), f"group {group}: used slots are miscounted"
        ages = np.minimum(self.now + 1 - last_use, AGE_MAX)
        return np.bincount(ages, minlength=AGE_MAX + 1)

    def slots_of(self, group: int, member: int = 0) -> Bytes:
        """The slots as the member-th layer of this group sees them: slot s is row s."""
        layers = self.layout.groups[group]
        assert 0 <= member < len(layers), f"group {group} has no member {member}"
        return self._views[self.chunks.slab_number(group)][member * PAGE_ROWS :]

    # ---- a step

    @property
    def now(self) -> int:
        """The number of the step in the slots' 32 bits: after `NOW_MAX` the numbers begin again."""
        return self.step - self._passed

    def begin_step(self) -> int:
        """Starts a new age. When no copy is in flight tickets may start over, long before the
        end."""
        if self.now >= NOW_MAX:
            self._begin_anew()
        self.step += 1
        if self._ticket > TICKET_MAX and not self._ticket_of.any():
            self._ticket = 0
        assert self.step > FIRST_STEP, "ages would reach back to before the first step"
        return self.step

    def _begin_anew(self) -> None:
        """All ages stay as they are."""
        by, used = self.now - FIRST_STEP, self._last_use
        self._evictions.begin_anew(used, by=by, least=LEAST_USE)
        np.maximum(used - np.int32(by), LEAST_USE, out=used)
        self._passed += by
        assert self.now == FIRST_STEP, f"step {self.step} is named {self.now}"

    def plan(self, group: int, rows: RowIds, split: Split) -> FetchPlan:
        """Claims slots for the selected `rows` [queries, k]; `split` gets the place of each row."""
        arena, ticket = self._arenas[group], self.ticket()
        return self._counted(planner.plan(arena, rows, step=self.now, ticket=ticket, split=split))

    def resolve(
        self,
        group: int,
        lookup: Lookup,
        selection: RowIds,
        line_of: RowIds,
        length: RowIds,
        split: Split,
    ) -> FetchPlan:
        """`plan` for positions in page table lines; `lookup` gets the sources of the claims."""
        layers = self.layout.groups[group]
        plan = planner.resolve(
            self._arenas[group],
            lookup,
            selection,
            line_of,
            length,
            layers=range(layers[0], layers[-1] + 1),
            step=self.now,
            ticket=self.ticket(),
            split=split,
        )
        return self._counted(plan)

    def resolved(
        self, group: int, lookup: Lookup, split: Split, *, ticket: int, claimed: int
    ) -> FetchPlan:
        """The plan of a native `resolve` that was called with `addresses` of this group."""
        plan = planner.resolved(self._arenas[group], lookup, split, ticket=ticket, claimed=claimed)
        return self._counted(plan)

    def took(self, groups: range, claimed: npt.NDArray[Any], evicted: Counts) -> None:
        """Notes how many slots of these groups were claimed for rows that have been copied, and how
        many rows gave way."""
        self._counts.took(groups, claimed, evicted)

    def observe(
        self,
        group: int,
        lookup: Lookup,
        selection: RowIds,
        line_of: RowIds,
        length: RowIds,
        logits: npt.NDArray[np.float32],
    ) -> None:
        """Scores every position of each query from the indexer's logits: for eviction by score."""
        planner.observe(self._arenas[group], lookup, selection, line_of, length, logits=logits)

    def locate_into(
        self,
        out: SlotIds,
        group: int,
        lookup: Lookup,
        selection: RowIds,
        line_of: RowIds,
        length: RowIds,
    ) -> int:
        """`locate` for positions in page table lines; returns how many have no landed slot."""
        return planner.locate(self._arenas[group], lookup, selection, line_of, length, out=out)

    def locate(self, group: int, rows: RowIds) -> SlotIds:
        """Slots of rows that have landed, -1 for all others. Changes nothing."""
        slots = np.where(rows >= 0, self.slot_of[group, rows], np.int32(-1))
        landed: SlotIds = np.where(self._ticket_of[slots] == 0, slots, np.int32(-1))
        return landed

    def warm(self, group: int, rows: RowIds, ages: RowIds) -> FetchPlan:
        """Plans rows of late prefill windows, newest first, as if used `ages` steps ago."""
        arena, ticket = self._arenas[group], self.ticket()
        return self._counted(planner.warm(arena, rows, ages, step=self.now, ticket=ticket))

    def fill(self, group: int, rows: RowIds) -> FetchPlan:
        """Plans rows into free slots while these last; no row gives way."""
        arena, ticket = self._arenas[group], self.ticket()
        return self._counted(planner.fill(arena, rows, step=self.now, ticket=ticket))

    def ticket(self) -> int:
        """A new ticket, for the next copy."""
        self._ticket += 1
        assert self._ticket < 1 << 31, "tickets ran out with copies in flight"
        return self._ticket

    def _counted(self, plan: FetchPlan) -> FetchPlan:
        self._counts.planned(plan.group, len(plan.slots), plan.evicted_count)
        return plan

    def commit(self, plan: FetchPlan) -> None:
        """The copy of this plan has landed: its rows are hits from now on."""
        assert not plan.is_landed, f"group {plan.group}: a plan that has landed was committed"
        planner.land(self._arenas[plan.group], plan.slots, ticket=plan.ticket)

    def claim_new(self, groups: range, rows: RowIds, *, out: SlotIds) -> int:
        """Dirty slots for rows that this step writes: a line of `out` for each group, up to the
        first group that has too few of them, where nothing changes. Returns how many had enough."""
        assert 0 <= groups.start <= groups.stop <= self.layout.group_count, f"groups {groups}"
        absent = np.empty(len(groups), np.int32)
        arenas = self._arenas[groups.start : groups.stop]
        count = planner.claim_each(arenas, rows, step=self.now, out=out, absent=absent)
        done = groups[:count]
        mine, claimed = slice(done.start, done.stop), absent[:count]
        free = self._counts.total[mine] - self._counts.used[mine]
        self.took(done, claimed, np.maximum(claimed - free, 0))
        if self._poison:
            for group, slots in zip(done, out, strict=False):
                self._poison_slots(group, slots)
        return count

    def _poison_slots(self, group: int, slots: SlotIds) -> None:
        for member in range(len(self.layout.groups[group])):
            self.slots_of(group, member)[slots] = POISON

    def settle(self, slots: SlotIds) -> None:
        """The stores of these slots, in any groups, have landed."""
        planner.settle(self._arenas[0], slots)

    def drop(self, groups: Sequence[int], rows: RowIds) -> None:
        self.left(groups, self._dropped(groups, rows))

    def left(self, groups: Sequence[int], counts: Sequence[int]) -> None:
        """Counts dropped rows out of each group."""
        self._counts.left(groups, counts, departed=False)

    def _dropped(self, groups: Sequence[int], rows: RowIds) -> Sequence[int]:
        return planner.drop_each([self._arenas[group] for group in groups], rows)

    def addresses(self, groups: Sequence[int]) -> list[int]:
        """Addresses of these groups' native records, to be used at once."""
        return planner.addresses([self._arenas[group] for group in groups])

    def drop_pages(self, active: PageIds) -> None:
        """All rows of these pages leave every group: the page ids may be used again."""
        groups = range(self.layout.group_count)
        self._counts.left(groups, self._dropped(groups, page_rows(active)), departed=True)

    # ---- budgets

    def move_chunks(self, source: int, target: int, count: int = 1) -> bool:
        """Gives `target` the last `count` neighbouring chunks of `source` that no step and no copy
        uses, if any."""
        for chunks in self.chunks.movable(source, target, count):
            if self._clear(source, self.chunks.blocks_in(chunks, source)):
                self.chunks.give(chunks, source, target)
                for group in (source, target):
                    self._arenas[group].blocks = self.chunks.blocks(group)
                self._counts.moved(self._counted_slots())
                return True
        return False

    def _clear(self, group: int, blocks: SlotIds) -> bool:
        slots = page_rows(blocks // np.int32(PAGE_ROWS))
        used = self._row_of[slots] >= 0
        selected = self._last_use[slots] >= self.now
        held = selected | (self._dirty[slots] != 0) | (self._ticket_of[slots] != 0)
        if (used & held).any():
            return False
        for block in blocks.tolist():
            cleared = planner.clear_block(self._arenas[group], block, step=self.now)
            assert cleared, f"block {block} is held after all"
        assert (self._row_of[slots] == -1).all(), "a cleared chunk has a row"
        self._counts.left([group], [int(used.sum())], departed=True)
        return True

    # ---- audit

    def copies(self, group: int) -> tuple[SlotIds, RowIds]:
        """Slots that must equal the host's rows, being landed and not dirty, and these rows."""
        slots = self._arenas[group].slots
        clean = (self._dirty[slots] == 0) & (self._ticket_of[slots] == 0)
        slots = slots[clean & (self._row_of[slots] >= 0)].astype(np.int32)
        return slots, self._row_of[slots]

    def is_dirty(self, slots: SlotIds) -> npt.NDArray[np.bool_]:
        dirty: npt.NDArray[np.bool_] = self._dirty[slots] != 0
        return dirty

    def check(self) -> None:
        self.chunks.check()
        assert self._ticket_of.max() <= self._ticket, "a copy is in flight that was never planned"
        assert self._last_use.max() <= self.now, f"a slot was used after step {self.step}"
        blocks: list[int] = []
        for group, arena in enumerate(self._arenas):
            planner.check(arena, step=self.now)
            used = (self._row_of[arena.slots] >= 0).sum()
            counted = self.used_count(group)
            assert counted == used, f"group {group} counts {counted} used slots, has {int(used)}"
            blocks.extend(arena.blocks.tolist())
        assert len(set(blocks)) == len(blocks), "two groups own a block"
        assert np.array_equal(self._counts.total, self._counted_slots()), "slots are miscounted"
        mapped = int((self.slot_of >= 0).sum())
        assert mapped == self._counts.used.sum(), "rows in the map and slots in use differ"
