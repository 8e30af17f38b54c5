"""What the residency kernels are told, and which of them run for a batch of a given size.

Nothing in here touches a device. Arrays are anything with an address: NumPy's on the host for the
tests' emulated device, torch's on a real one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

from ess.errors import BadInput
from ess.kernels.cuda.program import Program
from ess.units import PAGE_ROWS, div_ceil

BINS: Final = 256
ITEMS: Final = 8
PHASE_THREADS: Final = 512
TOGETHER_THREADS: Final = 1024
ALONE_ENTRIES_MAX: Final = 8192
ALONE_SLOTS_MAX: Final = 32768
CLUSTER_BLOCKS: Final = 8
CLUSTER_BLOCKS_MAX: Final = 16
CLUSTER_ENTRIES_MAX: Final = CLUSTER_BLOCKS * 4096
CLUSTER_SLOTS_MAX: Final = CLUSTER_BLOCKS * 16384
ENTRIES_MAX: Final = 1 << 30

Purpose = Literal["select", "write", "warm"]
PURPOSES: Final[tuple[Purpose, ...]] = ("select", "write", "warm")

NOW: Final = ("step", "ticket", "query_count", "block_count", "stamps")
REPORT: Final = (
    *("claimed", "missing", "eligible", "absent", "hits", "places", "late_ticket"),
    *("evicted", "unwritten", "faults", "left", "held"),
)


def _pointers(*names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, ctypes.c_void_p) for name in names)


def _sizes(*names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, ctypes.c_int64) for name in names)


class ArenaRecord(ctypes.Structure):
    _fields_ = _pointers("slot_of", "row_of", "last_use", "ticket_of", "dirty", "blocks", "hit_age")


class SelectionRecord(ctypes.Structure):
    _fields_ = (
        *_pointers("positions", "page_table", "table_row", "length", "rows"),
        *_sizes("table_width", "width", "row_count"),
    )


class ResolveRecord(ctypes.Structure):
    """Resolve of csrc/residency/phases.cuh."""

    _fields_ = (
        ("arena", ArenaRecord),
        ("selection", SelectionRecord),
        *_pointers("now", "report"),
        *_pointers("slots", "hit", "miss", "place", "hit_count", "miss_count", "place_count"),
        *_pointers("claimed_slots", "claimed_rows", "claimed_host_rows", "host_page_of"),
        *_pointers("stored", "ages", "list_count"),
        *_pointers("pending", "first_count", "bin_count", "bin_total"),
        *_sizes("query_max", "tile_max", "split_width", "stored_width", "layer_count"),
        *_sizes("list_max", "purpose"),
    )


class LocateRecord(ctypes.Structure):
    """Locate of csrc/residency/locate.cu."""

    _fields_ = (
        ("arena", ArenaRecord),
        ("selection", SelectionRecord),
        *_pointers("now", "report", "slots"),
        *_sizes("split_width"),
    )


class UpkeepRecord(ctypes.Structure):
    """Upkeep of csrc/residency/upkeep.cu."""

    _fields_ = (
        ("arena", ArenaRecord),
        *_pointers("list", "count", "now", "report"),
        *_sizes("count_max"),
    )


class AuditRecord(ctypes.Structure):
    """Audit of csrc/residency/audit.cu."""

    _fields_ = (
        ("arena", ArenaRecord),
        *_pointers("now", "found", "first", "used", "resident"),
        *_sizes("row_count", "slot_count"),
    )


class Launch(NamedTuple):
    entry: str
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolveShape:
    """The largest call that a record is made for. Queries and blocks are counted on the device.

    `together` is how many blocks, one or those of a cluster, run all phases in one launch; 0 is a
    launch a phase over the whole device.
    """

    query_max: int
    top_k: int
    block_max: int
    together: int
    threads: int

    @classmethod
    def of(
        cls, *, query_max: int, top_k: int, block_max: int, clusters: bool = True
    ) -> ResolveShape:
        """`clusters`: whether the device has them, as every one since sm_90 does."""
        if min(query_max, top_k, block_max) < 1 or query_max * top_k > ENTRIES_MAX:
            raise BadInput(
                f"{query_max} queries of {top_k} rows over {block_max} blocks cannot be resolved"
            )
        together = blocks_together(query_max * top_k, block_max * PAGE_ROWS, clusters=clusters)
        return cls(
            query_max=query_max,
            top_k=top_k,
            block_max=block_max,
            together=together,
            threads=TOGETHER_THREADS if together else PHASE_THREADS,
        )

    @property
    def tile_max(self) -> int:
        return div_ceil(self.block_max * PAGE_ROWS, self.threads * ITEMS)

    @property
    def program(self) -> Program:
        return resolve_program(together=self.together, threads=self.threads)

    @property
    def launches(self) -> list[Launch]:
        """In this order; the report is zeroed before the first, which one launch does itself."""
        queries, tiles = self.query_max, self.tile_max
        assert queries > 0, "a launch for no query"
        assert tiles > 0, "a launch for no slot"
        if self.together:
            return [Launch("ess_resolve_together", self.together)]
        return [
            Launch("ess_probe", queries),
            Launch("ess_count", queries + tiles),
            Launch("ess_scan", div_ceil(BINS + 1, self.threads // 32)),
            Launch("ess_rank", tiles),
            Launch("ess_assign", queries),
            Launch("ess_serve", queries),
        ]

    @property
    def workspace(self) -> dict[str, int]:
        """int32 numbers that the phases hand to one another, by name."""
        entries = self.query_max * self.top_k
        return {
            "now": len(NOW),
            "report": len(REPORT),
            "claimed_slots": entries,
            "claimed_rows": entries,
            "claimed_host_rows": entries,
            "pending": self.query_max,
            "first_count": self.query_max,
            "bin_count": BINS * self.tile_max,
            "bin_total": BINS,
        }


def blocks_together(entry_count: int, slot_count: int, *, clusters: bool) -> int:
    """Blocks that run all phases in a single launch; 0 where a launch for each phase is faster.

    Six launches leave about 8 us of gaps and use the whole device; the barriers of a cluster cost
    about 2 us, those of a single block nothing, but there is no more to work with. A block needs
    about 3 us for the queries and tiles of a request, so a cluster pays until every block of it has
    a second request. A single block takes up to four: by then its missing barriers no longer make
    up for its work.
    """
    assert entry_count > 0, "no entry to resolve"
    assert slot_count > 0, "no slot to resolve into"
    if entry_count <= ALONE_ENTRIES_MAX and slot_count <= ALONE_SLOTS_MAX:
        return 1
    fits = entry_count <= CLUSTER_ENTRIES_MAX and slot_count <= CLUSTER_SLOTS_MAX
    return CLUSTER_BLOCKS if clusters and fits else 0


def resolve_program(*, together: int, threads: int) -> Program:
    if not together:
        return slot_program("resolve.cu", threads)
    return slot_program("together.cu", threads, ("ESS_BLOCKS", together))


def slot_program(file: str, threads: int, *more: tuple[str, int]) -> Program:
    assert 0 < threads <= 1024, f"a block of {threads} threads"
    assert threads % 32 == 0, f"{threads} threads are not whole warps"
    ways = ("ESS_LOAD", 0), ("ESS_STORE", 0)
    return Program(file=file, defines=(("ESS_THREADS", threads), *ways, *more))


def resolve_record(
    shape: ResolveShape,
    *,
    arena: Any,
    split: Any,
    workspace: Mapping[str, Any],
    rows: Any,
    host_page_of: Any = None,
    stored: Any = None,
    purpose: Purpose = "select",
    **selection: Any,
) -> ResolveRecord:
    """To "write" the rows are distinct and new to this step: slots for them, dirty at once.

    `stored` [layers of the group, host page] has the bits of the host rows that were ever written.
    The arrays must outlive every launch and every replay of a graph with this record in it.
    """
    if split.slots.shape[0] < shape.query_max or split.slots.shape[1] < shape.top_k:
        raise BadInput(
            f"a split of shape {tuple(split.slots.shape)} cannot hold {shape.query_max} queries "
            f"of {shape.top_k} rows"
        )
    record = _claims_record(shape, arena, workspace, host_page_of, stored, purpose)
    record.selection = selection_record(arena, rows, **selection)
    record.selection.width = shape.top_k
    for name in ("slots", "hit", "miss", "place", "hit_count", "miss_count", "place_count"):
        setattr(record, name, address(getattr(split, name)))
    record.split_width = split.slots.shape[1]
    return record


def warm_record(
    shape: ResolveShape,
    *,
    arena: Any,
    workspace: Mapping[str, Any],
    rows: Any,
    ages: Any = None,
    count: Any = None,
    host_page_of: Any = None,
    stored: Any = None,
) -> ResolveRecord:
    """Distinct rows and their ages, ascending from 1; without ages they take free slots alone.

    `count` lies on the device; without it the list is as long as its array.
    """
    assert len(rows.shape) == 1, f"rows of shape {tuple(rows.shape)}, not a list"
    room = shape.query_max * shape.top_k
    if rows.shape[0] > room or (ages is not None and ages.shape != rows.shape):
        shapes = tuple(rows.shape), None if ages is None else tuple(ages.shape)
        raise BadInput(f"rows and ages of shapes {shapes[0]} and {shapes[1]}, room for {room}")
    record = _claims_record(shape, arena, workspace, host_page_of, stored, "warm")
    record.selection = SelectionRecord(
        rows=address(rows), width=shape.top_k, row_count=arena.slot_of.shape[0]
    )
    record.ages, record.list_count = address(ages), address(count)
    record.list_max = rows.shape[0]
    return record


def _claims_record(
    shape: ResolveShape,
    arena: Any,
    workspace: Mapping[str, Any],
    host_page_of: Any,
    stored: Any,
    purpose: Purpose,
) -> ResolveRecord:
    assert workspace.keys() <= shape.workspace.keys(), f"a workspace of {sorted(workspace)}"
    record = ResolveRecord(query_max=shape.query_max, tile_max=shape.tile_max)
    record.arena = arena_record(arena)
    for name, array in workspace.items():
        setattr(record, name, address(array))
    record.host_page_of, record.stored = address(host_page_of), address(stored)
    record.layer_count, record.stored_width = (0, 0) if stored is None else stored.shape
    record.purpose = PURPOSES.index(purpose)
    return record


def locate_record(
    *,
    arena: Any,
    rows: Any,
    slots: Any,
    workspace: Mapping[str, Any],
    **selection: Any,
) -> LocateRecord:
    """Positions or row ids [query, column] to slots of the same shape or wider."""
    assert slots.shape[0] >= rows.shape[0], f"rows {rows.shape}, slots {slots.shape}"
    assert slots.shape[1] >= rows.shape[1], f"rows {rows.shape}, slots {slots.shape}"
    record = LocateRecord(
        arena=arena_record(arena),
        selection=selection_record(arena, rows, **selection),
        split_width=slots.shape[1],
    )
    for name, array in (("now", workspace["now"]), ("report", workspace["report"])):
        setattr(record, name, address(array))
    record.slots = address(slots)
    return record


def upkeep_record(
    arena: Any, numbers: Any, *, workspace: Mapping[str, Any], count: Any = None
) -> UpkeepRecord:
    """Slots, the rows that leave, or blocks to clear; without a count all of them."""
    assert len(numbers.shape) == 1, f"numbers of shape {tuple(numbers.shape)}, not a list"
    lists = numbers, count, workspace["now"], workspace["report"]
    return UpkeepRecord(arena_record(arena), *map(address, lists), numbers.shape[0])


def audit_record(arena: Any, findings: Any, *, workspace: Mapping[str, Any]) -> AuditRecord:
    """Findings are two counts, then a count and a place of each kind."""
    assert findings.shape[0] % 2 == 0, "a count and a place of each kind, after two counts"
    home, number = address(findings) or 0, ctypes.sizeof(ctypes.c_int32)
    kinds = (findings.shape[0] - 2) // 2
    places = (home + at * number for at in (2, 2 + kinds, 0, 1))
    sizes = arena.slot_of.shape[0], arena.row_of.shape[0]
    return AuditRecord(arena_record(arena), address(workspace["now"]), *places, *sizes)


def arena_record(arena: Any) -> ArenaRecord:
    slab = {getattr(arena, name).shape[0] for name in ("row_of", "last_use", "ticket_of", "dirty")}
    assert len(slab) == 1, f"slab arrays differ in size: {slab}"
    return ArenaRecord(*(address(getattr(arena, name)) for name, _ in ArenaRecord._fields_))


def selection_record(
    arena: Any,
    rows: Any,
    *,
    positions: Any = None,
    page_table: Any = None,
    table_row: Any = None,
    length: Any = None,
) -> SelectionRecord:
    """Row ids, or positions of contexts of `length` tokens and room for their row ids."""
    if len({array is None for array in (positions, page_table, table_row)}) > 1:
        raise BadInput("positions need a page_table and a table_row; row ids need none of these")
    return SelectionRecord(
        *map(address, (positions, page_table, table_row, length, rows)),
        0 if page_table is None else page_table.shape[1],
        rows.shape[1],
        arena.slot_of.shape[0],
    )


def address(array: Any) -> int | None:
    """Of the first element; None for no array."""
    if array is None:
        return None
    if hasattr(array, "data_ptr"):
        return int(array.data_ptr())
    return int(array.__array_interface__["data"][0])
