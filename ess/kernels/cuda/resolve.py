"""What the residency kernels are told, and which of them run for a batch of a given size.

Nothing in here touches a device. Arrays are anything with an address: NumPy's on the host for the
tests' emulated device, torch's on a real one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ess.errors import BadInput
from ess.kernels.cuda.program import Program
from ess.units import PAGE_ROWS, div_ceil

BINS: Final = 256
ITEMS: Final = 8
PHASE_THREADS: Final = 512
ALONE_THREADS: Final = 1024
ALONE_ENTRIES_MAX: Final = 8192
ALONE_SLOTS_MAX: Final = 32768
ENTRIES_MAX: Final = 1 << 30

NOW: Final = ("step", "ticket", "query_count", "block_count", "stamps")
REPORT: Final = (
    *("claimed", "missing", "eligible", "absent", "hits", "places", "late_ticket"),
    *("evicted", "faults"),
)


def _pointers(*names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, ctypes.c_void_p) for name in names)


def _sizes(*names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, ctypes.c_int64) for name in names)


class ArenaRecord(ctypes.Structure):
    _fields_ = _pointers("slot_of", "row_of", "last_use", "ticket_of", "dirty", "blocks", "hit_age")


class SelectionRecord(ctypes.Structure):
    _fields_ = (
        *_pointers("positions", "page_table", "table_row", "rows"),
        *_sizes("table_width", "width", "row_count"),
    )


class ResolveRecord(ctypes.Structure):
    """Resolve of csrc/flashtrans/phases.cuh."""

    _fields_ = (
        ("arena", ArenaRecord),
        ("selection", SelectionRecord),
        *_pointers("now", "report"),
        *_pointers("slots", "hit", "miss", "place", "hit_count", "miss_count", "place_count"),
        *_pointers("claimed_slots", "claimed_rows", "claimed_host_rows", "host_page_of"),
        *_pointers("pending", "first_count", "bin_count", "bin_total"),
        *_sizes("query_max", "tile_max", "split_width", "writes"),
    )


class LocateRecord(ctypes.Structure):
    """Locate of csrc/flashtrans/locate.cu."""

    _fields_ = (
        ("arena", ArenaRecord),
        ("selection", SelectionRecord),
        *_pointers("now", "report", "slots"),
        *_sizes("split_width"),
    )


class UpkeepRecord(ctypes.Structure):
    """Upkeep of csrc/flashtrans/upkeep.cu."""

    _fields_ = (
        ("arena", ArenaRecord),
        *_pointers("list", "count", "ticket"),
        *_sizes("count_max"),
    )


class Launch(NamedTuple):
    entry: str
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolveShape:
    """The largest call that a record is made for. Queries and blocks are counted on the device."""

    query_max: int
    top_k: int
    block_max: int
    alone: bool
    threads: int

    @classmethod
    def of(cls, *, query_max: int, top_k: int, block_max: int) -> ResolveShape:
        """One block of threads does it all where that is faster than six launches."""
        if min(query_max, top_k, block_max) < 1 or query_max * top_k > ENTRIES_MAX:
            raise BadInput(
                f"{query_max} queries of {top_k} rows over {block_max} blocks cannot be resolved"
            )
        small = query_max * top_k <= ALONE_ENTRIES_MAX
        alone = small and block_max * PAGE_ROWS <= ALONE_SLOTS_MAX
        threads = ALONE_THREADS if alone else PHASE_THREADS
        return cls(
            query_max=query_max, top_k=top_k, block_max=block_max, alone=alone, threads=threads
        )

    @property
    def tile_max(self) -> int:
        return div_ceil(self.block_max * PAGE_ROWS, self.threads * ITEMS)

    @property
    def program(self) -> Program:
        return resolve_program(alone=self.alone, threads=self.threads)

    @property
    def launches(self) -> list[Launch]:
        """In this order; the report is zeroed before the first, which `alone` does itself."""
        queries, tiles = self.query_max, self.tile_max
        if self.alone:
            return [Launch("ess_resolve_alone", 1)]
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


def resolve_program(*, alone: bool, threads: int) -> Program:
    return slot_program("alone.cu" if alone else "resolve.cu", threads)


def slot_program(file: str, threads: int) -> Program:
    ways = ("ESS_LOAD", 0), ("ESS_STORE", 0)
    return Program(file=file, defines=(("ESS_THREADS", threads), *ways))


def resolve_record(
    shape: ResolveShape,
    *,
    arena: Any,
    split: Any,
    workspace: Mapping[str, Any],
    rows: Any,
    positions: Any = None,
    page_table: Any = None,
    table_row: Any = None,
    host_page_of: Any = None,
    writes: bool = False,
) -> ResolveRecord:
    """With `writes` the rows are distinct and new to this step: slots for them, dirty at once.

    The arrays must outlive every launch and every replay of a graph with this record in it.
    """
    if split.slots.shape[0] < shape.query_max or split.slots.shape[1] < shape.top_k:
        raise BadInput(
            f"a split of shape {tuple(split.slots.shape)} cannot hold {shape.query_max} queries "
            f"of {shape.top_k} rows"
        )
    record = ResolveRecord(query_max=shape.query_max, tile_max=shape.tile_max, writes=int(writes))
    record.arena = arena_record(arena)
    record.selection = selection_record(arena, rows, positions, page_table, table_row)
    record.selection.width = shape.top_k
    for name in ("slots", "hit", "miss", "place", "hit_count", "miss_count", "place_count"):
        setattr(record, name, address(getattr(split, name)))
    for name, array in workspace.items():
        setattr(record, name, address(array))
    record.host_page_of = address(host_page_of)
    record.split_width = split.slots.shape[1]
    return record


def locate_record(
    *,
    arena: Any,
    rows: Any,
    slots: Any,
    workspace: Mapping[str, Any],
    positions: Any = None,
    page_table: Any = None,
    table_row: Any = None,
) -> LocateRecord:
    """Positions or row ids [query, column] to slots of the same shape or wider."""
    record = LocateRecord(
        arena=arena_record(arena),
        selection=selection_record(arena, rows, positions, page_table, table_row),
        split_width=slots.shape[1],
    )
    for name, array in (("now", workspace["now"]), ("report", workspace["report"])):
        setattr(record, name, address(array))
    record.slots = address(slots)
    return record


def upkeep_record(
    arena: Any, numbers: Any, *, count: Any = None, ticket: Any = None
) -> UpkeepRecord:
    """Slots, or the rows that leave; without a count all of them."""
    return UpkeepRecord(
        arena_record(arena), address(numbers), address(count), address(ticket), numbers.shape[0]
    )


def arena_record(arena: Any) -> ArenaRecord:
    return ArenaRecord(*(address(getattr(arena, name)) for name, _ in ArenaRecord._fields_))


def selection_record(
    arena: Any, rows: Any, positions: Any, page_table: Any, table_row: Any
) -> SelectionRecord:
    if len({one is None for one in (positions, page_table, table_row)}) > 1:
        raise BadInput("positions need a page_table and a table_row; row ids need none of these")
    return SelectionRecord(
        *map(address, (positions, page_table, table_row, rows)),
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
