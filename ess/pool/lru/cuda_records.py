"""The records that the residency kernels are given. This module touches no device.

Arrays are anything with an address: NumPy's on the host for the tests' emulated device, torch's on
a real one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Final, Literal

from ess.errors import BadInput
from ess.kernels.cpu.records import COUNT, POINTER, fields
from ess.pool.lru.cuda_shape import FIRST, NOW, PHASE_THREADS, Moment, ResolveShape
from ess.units import PAGE_ROWS, div_ceil

Purpose = Literal["select", "write", "warm"]
FOLLOW_BLOCKS: Final = 2048
FOLLOW_BLOCKS_EACH: Final = 16
"""Blocks take pages, a warp for each page. All queries share `FOLLOW_BLOCKS`, but where queries are
many each has `FOLLOW_BLOCKS_EACH`. A page is four loads that wait for one another, so the pages of
few queries are spread over many warps."""
PURPOSES: Final[tuple[Purpose, ...]] = ("select", "write", "warm")


class ArenaRecord(ctypes.Structure):
    _fields_ = (
        *fields(POINTER, "slot_of", "row_of", "last_use", "ticket_of", "dirty"),
        *fields(POINTER, "blocks", "block_count", "hit_age", "rank_of"),
    )


class MomentRecord(ctypes.Structure):
    """Moment of csrc/residency/resolve.cuh."""

    _fields_ = (*fields(POINTER, "now"), *fields(COUNT, "copy", "waited"))


class SelectionRecord(ctypes.Structure):
    _fields_ = (
        *fields(POINTER, "positions", "page_table", "table_row", "length", "rows"),
        *fields(COUNT, "table_width", "width", "row_count"),
    )


class ResolveRecord(ctypes.Structure):
    """Resolve of csrc/residency/phases.cuh."""

    _fields_ = (
        ("arena", ArenaRecord),
        ("selection", SelectionRecord),
        ("moment", MomentRecord),
        *fields(POINTER, "queries", "report"),
        *fields(POINTER, "slots", "hit", "miss", "place", "hit_count", "miss_count", "place_count"),
        *fields(POINTER, "claimed_slots", "claimed_host_rows", "host_page_of"),
        *fields(POINTER, "stored", "ages", "list_count"),
        *fields(POINTER, "first_count", "bin_count", "bin_total"),
        *fields(COUNT, "query_first", "query_max", "tile_max", "split_width", "stored_width"),
        *fields(COUNT, "layer_count", "list_max", "purpose"),
    )


class EachRecord(ctypes.Structure):
    """Each of csrc/residency/each.cu."""

    _fields_ = (*fields(POINTER, "calls"), *fields(COUNT, "each"))


class ObserveRecord(ctypes.Structure):
    """Observe of csrc/residency/scores.cu."""

    _fields_ = (
        ("selection", SelectionRecord),
        *fields(POINTER, "logits", "rank_of", "scales", "holders", "queries", "report"),
        *fields(COUNT, "query_first", "query_max", "stride", "blocks_each"),
    )


class LocateRecord(ctypes.Structure):
    """Locate of csrc/residency/locate.cu."""

    _fields_ = (
        ("arena", ArenaRecord),
        ("selection", SelectionRecord),
        ("moment", MomentRecord),
        *fields(POINTER, "queries", "report", "slots"),
        *fields(COUNT, "query_first", "split_width"),
    )


class UpkeepRecord(ctypes.Structure):
    """Upkeep of csrc/residency/upkeep.cu."""

    _fields_ = (
        ("arena", ArenaRecord),
        *fields(POINTER, "list", "count"),
        ("moment", MomentRecord),
        *fields(POINTER, "report"),
        *fields(COUNT, "count_max"),
    )


class AuditRecord(ctypes.Structure):
    """Audit of csrc/residency/audit.cu."""

    _fields_ = (
        ("arena", ArenaRecord),
        ("moment", MomentRecord),
        *fields(POINTER, "found", "first", "used", "resident"),
        *fields(COUNT, "row_count", "slot_count"),
    )


def resolve_record(
    shape: ResolveShape,
    *,
    arena: Any,
    split: Any,
    workspace: Mapping[str, Any],
    rows: Any,
    moment: Moment = FIRST,
    query_count: Any = None,
    host_page_of: Any = None,
    stored: Any = None,
    **selection: Any,
) -> ResolveRecord:
    """The number of queries lies on the device: in `now`, or in the call's own `query_count`.
    `stored` [layers of the group, host page] marks the host rows that were ever written. The arrays
    must outlive every launch and every replay of a graph with this record.
    """
    _require_lines(shape, rows, split)
    if host_page_of is None:
        raise BadInput("rows without a slot are named by host row: a host_page_of is needed")
    record = _claims_record(shape, arena, workspace, moment, host_page_of, stored, "select")
    record.selection = selection_record(arena, rows, **selection)
    record.queries = query_count_address(workspace, query_count)
    record.query_first, record.query_max = moment.first, rows.shape[0]
    for name in ("slots", "hit", "miss", "place", "hit_count", "miss_count", "place_count"):
        setattr(record, name, address(getattr(split, name)))
    record.split_width = split.slots.shape[1]
    return record


def _require_lines(shape: ResolveShape, rows: Any, split: Any) -> None:
    if rows.shape[1] != shape.top_k or not 0 < rows.shape[0] <= shape.query_max:
        raise BadInput(
            f"rows have shape {tuple(rows.shape)}, must be {shape.top_k} wide and at most "
            f"{shape.query_max} lines"
        )
    if split.slots.shape[0] < rows.shape[0] or split.slots.shape[1] < shape.top_k:
        raise BadInput(
            f"a split of shape {tuple(split.slots.shape)} cannot hold {rows.shape[0]} queries "
            f"of {shape.top_k} rows"
        )


def claim_record(
    shape: ResolveShape,
    *,
    arena: Any,
    workspace: Mapping[str, Any],
    rows: Any,
    slots: int,
    query_count: int,
) -> ResolveRecord:
    """Dirty slots for a line of distinct rows that a step is about to write.

    `slots` and `query_count`, which holds 1, are addresses.
    """
    width = shape.top_k
    assert tuple(rows.shape) == (1, width), f"rows of shape {tuple(rows.shape)}, not a line"
    record = _claims_record(shape, arena, workspace, FIRST, None, None, "write")
    record.selection = selection_record(arena, rows)
    record.queries, record.slots, record.split_width = query_count, slots, width
    return record


def warm_record(
    shape: ResolveShape,
    *,
    arena: Any,
    workspace: Mapping[str, Any],
    rows: Any,
    moment: Moment = FIRST,
    ages: Any = None,
    count: Any = None,
    host_page_of: Any = None,
    stored: Any = None,
) -> ResolveRecord:
    """Distinct rows and their ages, ascending from 1; without ages only free slots are taken.

    `count` lies on the device; without it the whole array counts.
    """
    assert len(rows.shape) == 1, f"rows of shape {tuple(rows.shape)}, not a list"
    room = shape.query_max * shape.top_k
    if rows.shape[0] > room or (ages is not None and ages.shape != rows.shape):
        shapes = tuple(rows.shape), None if ages is None else tuple(ages.shape)
        raise BadInput(f"rows and ages of shapes {shapes[0]} and {shapes[1]}, room for {room}")
    record = _claims_record(shape, arena, workspace, moment, host_page_of, stored, "warm")
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
    moment: Moment,
    host_page_of: Any,
    stored: Any,
    purpose: Purpose,
) -> ResolveRecord:
    names = {"now", "report", *shape.claims, *shape.scratch}
    assert workspace.keys() <= names, f"a workspace of {sorted(workspace)}"
    record = ResolveRecord(query_max=shape.query_max, tile_max=shape.tile_max)
    record.arena, record.moment = arena_record(arena), moment_record(workspace, moment)
    for name in workspace.keys() - {"now"}:
        setattr(record, name, address(workspace[name]))
    record.host_page_of, record.stored = address(host_page_of), address(stored)
    record.layer_count, record.stored_width = (0, 0) if stored is None else stored.shape
    record.purpose = PURPOSES.index(purpose)
    return record


def observe_record(
    *,
    arena: Any,
    positions: Any,
    logits: Any,
    scales: Any,
    holders: Any,
    workspace: Mapping[str, Any],
    moment: Moment = FIRST,
    query_count: Any = None,
    **context: Any,
) -> ObserveRecord:
    """Logits float32 [query, position], from which these positions were selected; `scales` has room
    for two float32 a query; `holders` is two int32 a page of row ids, zeros between calls."""
    lines = positions.shape[0]
    assert logits.shape[0] == lines, f"{logits.shape[0]} lines of logits for {lines} queries"
    assert scales.shape[0] >= 2 * lines, f"{scales.shape[0]} numbers for scales of {lines} queries"
    record = ObserveRecord(
        selection=selection_record(arena, positions, positions=positions, **context),
        logits=address(logits),
        rank_of=address(arena.rank_of),
        scales=address(scales),
        holders=address(holders),
        queries=query_count_address(workspace, query_count),
        report=address(workspace["report"]),
        query_first=moment.first,
        query_max=lines,
        stride=logits.shape[1],
    )
    assert holders.shape[0] * PAGE_ROWS >= 2 * record.selection.row_count, "pages without holders"
    pages = min(div_ceil(logits.shape[1], PAGE_ROWS), record.selection.table_width)
    most = max(FOLLOW_BLOCKS_EACH, FOLLOW_BLOCKS // lines)
    record.blocks_each = min(most, max(1, div_ceil(pages, PHASE_THREADS // 32)))
    return record


def locate_record(
    *,
    arena: Any,
    rows: Any,
    slots: Any,
    workspace: Mapping[str, Any],
    moment: Moment = FIRST,
    query_count: Any = None,
    **selection: Any,
) -> LocateRecord:
    """Looks up the slots of positions or row ids [query, column], in the same shape or wider."""
    assert slots.shape[0] >= rows.shape[0], f"rows {rows.shape}, slots {slots.shape}"
    assert slots.shape[1] >= rows.shape[1], f"rows {rows.shape}, slots {slots.shape}"
    return LocateRecord(
        arena=arena_record(arena),
        selection=selection_record(arena, rows, **selection),
        moment=moment_record(workspace, moment),
        queries=query_count_address(workspace, query_count),
        report=address(workspace["report"]),
        slots=address(slots),
        query_first=moment.first,
        split_width=slots.shape[1],
    )


def upkeep_record(
    arena: Any, numbers: Any, *, workspace: Mapping[str, Any], count: Any = None
) -> UpkeepRecord:
    """For slots, rows that leave, or blocks to clear; without a count, all of `numbers`."""
    assert len(numbers.shape) == 1, f"numbers of shape {tuple(numbers.shape)}, not a list"
    return UpkeepRecord(
        arena=arena_record(arena),
        list=address(numbers),
        count=address(count),
        moment=moment_record(workspace, FIRST),
        report=address(workspace["report"]),
        count_max=numbers.shape[0],
    )


def audit_record(arena: Any, findings: Any, *, workspace: Mapping[str, Any]) -> AuditRecord:
    """`findings` are two counts, then a count and a place for each kind."""
    assert findings.shape[0] % 2 == 0, "a count and a place of each kind, after two counts"
    home, number = address(findings) or 0, ctypes.sizeof(ctypes.c_int32)
    kinds = (findings.shape[0] - 2) // 2
    found, first, used, resident = (home + at * number for at in (2, 2 + kinds, 0, 1))
    return AuditRecord(
        arena=arena_record(arena),
        moment=moment_record(workspace, FIRST),
        found=found,
        first=first,
        used=used,
        resident=resident,
        row_count=arena.slot_of.shape[0],
        slot_count=arena.row_of.shape[0],
    )


def arena_record(arena: Any) -> ArenaRecord:
    slab = {getattr(arena, name).shape[0] for name in ("row_of", "last_use", "ticket_of", "dirty")}
    assert len(slab) == 1, f"slab arrays differ in size: {slab}"
    return ArenaRecord(*(address(getattr(arena, name)) for name, *_ in ArenaRecord._fields_))


def moment_record(workspace: Mapping[str, Any], moment: Moment) -> MomentRecord:
    assert moment.copy > 0, f"copies of a step count from 1: {moment}"
    assert 0 <= moment.waited < moment.copy, f"a call cannot have waited for its own copy: {moment}"
    return MomentRecord(address(workspace["now"]), moment.copy, moment.waited)


def query_count_address(workspace: Mapping[str, Any], query_count: Any) -> int:
    """Address of the number of queries: the step's, or the call's own."""
    if query_count is not None:
        return address(query_count) or 0
    return (address(workspace["now"]) or 0) + NOW.index("query_count") * ctypes.sizeof(
        ctypes.c_int32
    )


def selection_record(
    arena: Any,
    rows: Any,
    *,
    positions: Any = None,
    page_table: Any = None,
    table_row: Any = None,
    length: Any = None,
) -> SelectionRecord:
    """Row ids, or positions in contexts of `length` tokens with room for their row ids."""
    if len({array is None for array in (positions, page_table, table_row)}) > 1:
        raise BadInput("positions need a page_table and a table_row; row ids need none of these")
    return SelectionRecord(
        *map(address, (positions, page_table, table_row, length, rows)),
        0 if page_table is None else page_table.shape[1],
        rows.shape[1],
        arena.slot_of.shape[0],
    )


def address(array: Any) -> int | None:
    """Address of the array's first element; None for no array."""
    if array is None:
        return None
    if hasattr(array, "data_ptr"):
        return int(array.data_ptr())
    return int(array.__array_interface__["data"][0])
