"""The residency of one layer group as plain arrays, and the arrays a plan is written into.

    slot_of[row id]  -> slot, -1 absent         one array per group
    row_of[slot]     -> row id, -1 free    \\
    last_use[slot]   -> step of last use    |   one array per slab, shared by all groups; a group
    ticket_of[slot]  -> 0 landed, else the  |   looks only at the 64-slot blocks that it owns
                        copy in flight      |
    dirty[slot]      -> 1 newer than host  /

The arrays belong to the caller and change in place. The operations on them are `specification` and
`planner` (the native twin); `eviction` has what a policy keeps beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ess.array_types import Bytes, Ints
from ess.pool.lru.eviction import Eviction, Evictions, PolicyName

BLOCK_SLOTS: Final = 64
AGE_MAX: Final = 255
AGE_FREE: Final = 256
SCRATCH_ROWS: Final = 4


def make_scratch(slot_count: int) -> Ints:
    return np.empty((SCRATCH_ROWS, slot_count), np.int32)


@dataclass(slots=True, kw_only=True, eq=False)
class Arena:
    """The residency of one layer group: the slot of each row, its last use, and the rows that must
    stay.

    `group` is its number in the layout, which its plans carry.
    `scratch` is working room of the native twin (`make_scratch`). The groups of one slab may share
    one, if one thread at a time works on them; an arena without one gets its own.
    """

    slot_of: Ints
    row_of: Ints
    last_use: Ints
    ticket_of: Ints
    dirty: npt.NDArray[np.uint8]
    blocks: Ints
    hit_age: npt.NDArray[np.int64]
    scratch: Ints | None = field(default=None, repr=False)
    group: int = 0
    eviction: Eviction = field(default_factory=Eviction)
    native: Any = field(default=None, init=False, repr=False)

    def __setattr__(self, name: str, value: Any) -> None:
        """Replacing an array (blocks move between groups) unbinds the native twin."""
        object.__setattr__(self, name, value)
        if name != "native":
            object.__setattr__(self, "native", None)

    def assert_sound(self) -> None:
        """Asserts the shapes and types that native code relies on; `check` audits the values."""
        shapes = {
            name: getattr(self, name) for name in ("row_of", "last_use", "ticket_of", "dirty")
        }
        assert len({array.shape for array in shapes.values()}) == 1, "slab arrays differ in size"
        for name in ("slot_of", "row_of", "last_use", "ticket_of", "blocks", "scratch"):
            array = getattr(self, name)
            assert array is None or array.dtype == np.int32, f"{name} is {array.dtype}, not int32"
        assert self.dirty.dtype == np.uint8, f"dirty is {self.dirty.dtype}, not uint8"
        assert self.hit_age.dtype == np.int64, f"hit_age is {self.hit_age.dtype}, not int64"
        assert self.hit_age.shape == (AGE_MAX + 1,), f"hit_age has shape {self.hit_age.shape}"
        for array in (*shapes.values(), self.slot_of, self.blocks, self.hit_age):
            assert array.flags.c_contiguous, "an array of the arena is not C-contiguous"
        self._assert_eviction()
        if self.scratch is not None:
            assert self.scratch.shape == (SCRATCH_ROWS, self.row_of.size), "scratch: make_scratch"
            assert self.scratch.flags.c_contiguous, "scratch is not C-contiguous"

    def _assert_eviction(self) -> None:
        kept, slab, rows = self.eviction, self.row_of.size, self.slot_of.size
        sizes = {"sieve": (slab, slab, 2, 0), "score": (0, 0, 0, rows)}.get(kept.name, (0, 0, 0, 0))
        arrays: tuple[npt.NDArray[Any], ...] = (kept.came, kept.spared, kept.hand, kept.rank_of)
        kinds = (np.int64, np.int32, np.int64, np.uint16)
        for array, size, kind in zip(arrays, sizes, kinds, strict=True):
            assert array.shape == (size,), f"{kept.name}: an array of {array.shape}, not ({size},)"
            assert array.dtype == kind, f"{kept.name}: an array of {array.dtype}, not {kind}"
            assert array.flags.c_contiguous, f"{kept.name}: an array is not C-contiguous"

    @classmethod
    def alone(cls, *, row_count: int, slot_count: int, evict: PolicyName = "lru") -> Arena:
        """One group that owns a whole empty slab."""
        assert row_count > 0, f"an arena for {row_count} rows"
        assert slot_count % BLOCK_SLOTS == 0, f"{slot_count} slots are not whole blocks"
        return cls(
            slot_of=np.full(row_count, -1, np.int32),
            row_of=np.full(slot_count, -1, np.int32),
            last_use=np.zeros(slot_count, np.int32),
            ticket_of=np.zeros(slot_count, np.int32),
            dirty=np.zeros(slot_count, np.uint8),
            blocks=np.arange(0, slot_count, BLOCK_SLOTS, dtype=np.int32),
            hit_age=np.zeros(AGE_MAX + 1, np.int64),
            eviction=Evictions(evict, slot_count=slot_count, row_count=row_count).group(),
        )

    @property
    def slots(self) -> npt.NDArray[np.int64]:
        """Every slot of the group, ascending."""
        return (self.blocks[:, None].astype(np.int64) + np.arange(BLOCK_SLOTS)).reshape(-1)


@dataclass(slots=True, kw_only=True, eq=False)
class Split:
    """Where a plan puts its answer for every selected entry, at most [query_count, top_k] of them.

    A plan of rows [Q, k] writes the whole top-left [Q, k] of every array and the first Q counts;
    the rest keeps its values. `slots` has the entries in their given order: a slot, -1 for a pad,
    or -2 - row for a row served in place. `hit`, `miss` (slots) and `place` (row ids) hold the same
    entries sorted by kind, to the left in the given order, then -1.
    """

    slots: Ints
    hit: Ints
    miss: Ints
    place: Ints
    hit_count: Ints
    miss_count: Ints
    place_count: Ints
    claimed: Ints
    pending: Ints
    native: Any = field(default=None, init=False, repr=False)

    @classmethod
    def create(cls, *, query_count: int, top_k: int) -> Split:
        assert query_count > 0, f"a split for {query_count} queries"
        assert top_k > 0, f"a split for top-k {top_k}"
        shape = (4, query_count, top_k)
        slots, hit, miss, place = np.full(shape, -1, np.int32)
        hit_count, miss_count, place_count = np.zeros((3, query_count), np.int32)
        return cls(
            slots=slots,
            hit=hit,
            miss=miss,
            place=place,
            hit_count=hit_count,
            miss_count=miss_count,
            place_count=place_count,
            claimed=np.empty((2, query_count * top_k), np.int32),
            pending=np.empty(query_count * top_k, np.int32),
        )

    def holds(self, shape: tuple[int, ...]) -> bool:
        query_count, top_k = self.slots.shape
        return bool(shape[0] <= query_count and shape[1] <= top_k)


@dataclass(slots=True, kw_only=True, eq=False)
class Lookup:
    """Where positions lead: by `lines` of pages to row ids, by `host_page_of` to host rows, by
    `stored[layer, host page]` to the bits that say which of these were ever written.

    After a `resolve`, the top-left of `rows` has the row ids and the front of `host_rows` the
    sources of the claims; no copy may read `unwritten_count` of these. The native call copies
    claims of at most `at_once_bytes` from `host` [layer][host row] to `slab` itself, layer after
    layer, ending at `times` (ns); they have landed. The specification copies none.
    """

    lines: Ints
    host_page_of: Ints
    stored: npt.NDArray[np.uint64]
    rows: Ints
    host_rows: Ints
    host: Sequence[Bytes] = ()
    slab: Bytes = field(default_factory=lambda: np.empty((0, 0), np.uint8))
    times: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    at_once_bytes: int = 0
    unwritten_count: int = 0
    native: Any = field(default=None, init=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FetchPlan:
    """Rows that were claimed and must be copied: rows[i] of the host into slots[i] of the slab.

    If they have landed already there is nothing left to copy, and the two lists live until the next
    plan. `late_ticket` names the latest earlier copy that a selected row still waits for. Counts
    are of entries, duplicates included; `evicted_count` is of rows.
    """

    group: int
    ticket: int
    slots: Ints
    rows: Ints
    hit_count: int = 0
    place_count: int = 0
    late_ticket: int = 0
    evicted_count: int = 0
    is_landed: bool = False

    @property
    def is_pending(self) -> bool:
        """Whether the caller must wait, for these rows or for rows of an earlier plan."""
        return (len(self.rows) > 0 and not self.is_landed) or self.late_ticket > 0


def check(arena: Arena, *, step: int) -> None:
    """Audits the whole group; an AssertionError names the row or slot that is wrong."""
    _check_blocks(arena)
    slots = arena.slots
    row, age = arena.row_of[slots], step - arena.last_use[slots]
    used, in_flight = row >= 0, arena.ticket_of[slots] != 0
    is_dirty = arena.dirty[slots] != 0
    _assert_none(slots, (row < -1) | (row >= arena.slot_of.size), "holds an impossible row id")
    back = np.where(used, arena.slot_of[row], slots)
    _assert_none(slots, back != slots, "holds a row whose slot_of points elsewhere")
    _assert_none(slots, used & (age < 0), f"was last used after step {step}")
    _assert_none(slots, is_dirty & in_flight, "is dirty and in flight")
    _assert_none(slots, ~used & (is_dirty | in_flight), "is free but dirty or in flight")
    _assert_none(slots, arena.ticket_of[slots] < 0, "has a negative ticket")
    resident = np.flatnonzero(arena.slot_of != -1)
    held = arena.slot_of[resident]
    owned = np.zeros(arena.row_of.size, np.bool_)
    owned[slots] = True
    is_owned = (held >= 0) & (held < owned.size) & owned[held.clip(0, owned.size - 1)]
    _assert_none(resident, ~is_owned, "(a row) has a slot that the group does not own")
    _assert_none(
        resident, arena.row_of[held] != resident, "(a row) has a slot that holds another row"
    )
    assert resident.size + int((~used).sum()) == slots.size, "free + used slots != all slots"


def _check_blocks(arena: Arena) -> None:
    blocks = arena.blocks
    assert not (blocks % BLOCK_SLOTS).any(), "a block does not start at a multiple of 64"
    assert (np.diff(blocks) > 0).all(), "blocks are not strictly ascending"
    inside = (blocks >= 0) & (blocks < arena.row_of.size)
    assert inside.all(), f"block {blocks[~inside]} lies outside a slab of {arena.row_of.size}"


def _assert_none(name: npt.NDArray[Any], wrong: npt.NDArray[np.bool_], sentence: str) -> None:
    assert not wrong.any(), f"{int(name[wrong][0])} {sentence} ({int(wrong.sum())} in all)"
