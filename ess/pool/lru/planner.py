"""The operations of `specification` in native code, if it is built: same arrays, same bits.

The addresses of the arrays of an arena and of a split are looked up at the first call and kept with
them; an array of an arena may be replaced (that unbinds it), one of a split may not.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from ess.array_types import Ints
from ess.kernels.cpu import native
from ess.kernels.cpu.records import COUNT, POINTER, fields
from ess.pool.lru import specification
from ess.pool.lru.arena import AGE_MAX, Arena, FetchPlan, Lookup, Split, make_scratch
from ess.pool.lru.specification import check as check

_REFUSALS: Final = (
    "",
    "a row id is out of range",
    "a row is named twice",
    "a row to be written is still being fetched",
    "a slot was used after this step",
    "ages must ascend from 1",
    "a slot outside the slab",
    "a row of a page that is not active",
    "a position that leads nowhere",
    "a free slot cannot be settled",
)
_BAD_POSITION: Final = -8

_INT32_MAX: Final = 2**31 - 1

F = TypeVar("F", bound=Callable[..., Any])


def _twin_of(specification: F) -> Callable[[F], F]:
    """The native function where the library is built, else its specification."""
    return lambda twin: twin if native.available() else specification


class _ArenaRecord(ctypes.Structure):
    """`ess::Arena` in csrc/residency/arena.h."""

    _fields_ = (
        *fields(POINTER, "slot_of", "row_of", "last_use", "ticket_of", "dirty", "blocks"),
        *fields(POINTER, "hit_age", "scratch"),
        *fields(COUNT, "row_count", "slab_count", "block_count", "evicted_count"),
        *fields(POINTER, "came", "spared", "hand", "rank_of"),
        *fields(COUNT, "policy", "free_from"),  # free_from 0: not looked for yet
    )


class _SplitRecord(ctypes.Structure):
    """`ess::Split` in csrc/residency/planner.cpp."""

    _fields_ = (
        *fields(POINTER, "slots", "hit", "miss", "place"),
        *fields(POINTER, "hit_count", "miss_count", "place_count", "claimed", "pending"),
        *fields(COUNT, "width", "entry_count", "hit_total", "place_total", "late_ticket"),
    )


class _LookupRecord(ctypes.Structure):
    """`ess::Lookup` in csrc/residency/planner.cpp."""

    _fields_ = (
        *fields(POINTER, "lines", "host_page_of", "stored", "rows", "host_rows"),
        *fields(COUNT, "host"),  # of a group's first layer; set in each call
        *fields(POINTER, "slab", "times"),
        *fields(COUNT, "line_count", "page_max", "host_page_count", "slab_count"),
        *fields(COUNT, "row_bytes", "at_once_bytes", "unwritten_count", "is_landed"),
    )


class _Bound(NamedTuple):
    record: Any
    at: int


@functools.cache
def _symbol(name: str, pointer_count: int, integer_count: int) -> Callable[..., int]:
    """A native function that takes its pointers first, then its integers."""
    types = [ctypes.c_void_p] * pointer_count + [ctypes.c_int64] * integer_count
    return native.function(name, types, ctypes.c_int64)


def _accepted(status: int) -> int:
    assert status >= 0, _REFUSALS[-status]
    return status


def _bind(record: ctypes.Structure, *owners: Any, **numbers: int) -> _Bound:
    """Fills each pointer of the record from the owner that has an array of that name."""
    for name, kind in record._fields_:  # type: ignore[misc]
        if kind is POINTER:
            owner = next(owner for owner in owners if hasattr(owner, name))
            setattr(record, name, native.address(getattr(owner, name)))
    for name, number in numbers.items():
        setattr(record, name, number)
    return _Bound(record, ctypes.addressof(record))


def _bound_arena(arena: Arena) -> _Bound:
    if arena.native is None:
        if arena.scratch is None:
            arena.scratch = make_scratch(arena.row_of.size)
        arena.assert_sound()
        arena.native = _bind(
            _ArenaRecord(),
            arena,
            arena.eviction,
            row_count=arena.slot_of.size,
            slab_count=arena.row_of.size,
            block_count=arena.blocks.size,
            policy=arena.eviction.number,
        )
    return arena.native  # type: ignore[no-any-return]


def _bound_split(split: Split) -> _Bound:
    if split.native is None:
        size = split.slots.size
        split.native = _bind(_SplitRecord(), split, width=split.slots.shape[1], entry_count=size)
    return split.native  # type: ignore[no-any-return]


def _bound_lookup(lookup: Lookup) -> _Bound:
    if lookup.native is None:
        _assert_ids(2, lookup.lines, lookup.rows)
        _assert_ids(1, lookup.host_page_of, lookup.host_rows)
        assert lookup.host_rows.size >= lookup.rows.size, "each selected row may be a miss"
        assert lookup.stored.dtype == np.uint64, f"{lookup.stored.dtype} where uint64 is expected"
        arrays: list[npt.NDArray[Any]] = [lookup.stored, *lookup.host, lookup.slab, lookup.times]
        for array in arrays:
            assert array.flags.c_contiguous, "an array of the lookup is not C-contiguous"
        lookup.native = _bind(
            _LookupRecord(),
            lookup,
            line_count=len(lookup.lines),
            page_max=lookup.lines.shape[1],
            host_page_count=lookup.stored.shape[1],
            slab_count=len(lookup.slab),
            row_bytes=lookup.slab.shape[1],
        )
    return lookup.native  # type: ignore[no-any-return]


def _assert_ids(dimension_count: int, *arrays: Ints) -> None:
    for ids in arrays:
        assert ids.dtype == np.int32, f"{ids.dtype} where int32 is expected"
        assert ids.flags.c_contiguous, "an array is not C-contiguous"
        assert ids.ndim == dimension_count, f"shape {ids.shape}, not {dimension_count}-d"


def _assert_int32(number: int, name: str, *, lowest: int = 0) -> None:
    assert lowest <= number <= _INT32_MAX, f"{name} {number} lies outside [{lowest}, 2**31)"


@_twin_of(specification.translate)
def translate(
    selection: Ints, page_table: Ints, table_row: Ints, length: Ints, *, out: Ints
) -> None:
    """Positions [Q, k] to row ids through each query's page table; -1 stays -1."""
    _assert_ids(2, selection, page_table, out)
    _assert_ids(1, table_row, length)
    assert selection.shape == out.shape, f"selection {selection.shape} into {out.shape}"
    assert table_row.shape == length.shape == selection.shape[:1], "one table and length a query"
    pointers = map(native.address, (selection, page_table, table_row, length, out))
    if not _symbol("ess_translate", 5, 4)(*pointers, *selection.shape, *page_table.shape):
        specification.translate(selection, page_table, table_row, length, out=out)
        raise AssertionError("the native translation refused what its specification accepts")


@_twin_of(specification.plan)
def plan(arena: Arena, rows: Ints, *, step: int, ticket: int, split: Split) -> FetchPlan:
    """Stamps resident rows, claims slots for the others, and says where every entry is."""
    _assert_ids(2, rows)
    assert split.holds(rows.shape), f"rows {rows.shape}, split {split.slots.shape}"
    _assert_int32(ticket, "ticket", lowest=1)
    _assert_int32(step, "step")
    home, into = _bound_arena(arena), _bound_split(split)
    call = _symbol("ess_plan", 3, 4)
    claimed = _accepted(call(home.at, into.at, native.address(rows), *rows.shape, step, ticket))
    return _planned(arena, split, *split.claimed[:, :claimed].copy(), ticket=ticket)


def _planned(
    arena: Arena, split: Split, slots: Ints, rows: Ints, *, ticket: int, is_landed: bool = False
) -> FetchPlan:
    home, into = arena.native.record, split.native.record
    return FetchPlan(
        group=arena.group,
        ticket=ticket,
        slots=slots,
        rows=rows,
        hit_count=into.hit_total,
        place_count=into.place_total,
        late_ticket=into.late_ticket,
        evicted_count=home.evicted_count,
        is_landed=is_landed,
    )


@_twin_of(specification.resolve)
def resolve(
    arena: Arena,
    lookup: Lookup,
    selection: Ints,
    line_of: Ints,
    length: Ints,
    *,
    layers: range,
    step: int,
    ticket: int,
    split: Split,
) -> FetchPlan:
    """`translate`, then `plan`; also finds the host rows of the claims, for all of `layers`.

    Claims that are few, all written and wait for no other copy are copied and landed at once: a
    further call would cost more than the copy. The specification leaves every copy to the caller.
    """
    _assert_positions(selection, line_of, length)
    assert split.holds(selection.shape), f"{selection.shape}, split {split.slots.shape}"
    assert lookup.rows.shape == split.slots.shape, "row ids and slots lie as positions do"
    assert selection.shape[1] == split.slots.shape[1], "row ids lie as positions do"
    assert 0 <= layers.start <= layers.stop <= len(lookup.stored), f"{layers} of the layers"
    assert 0 < ticket <= _INT32_MAX, f"ticket {ticket}"
    assert 0 <= step <= _INT32_MAX, f"step {step}"
    home = arena.native or _bound_arena(arena)
    into, room = split.native or _bound_split(split), lookup.native or _bound_lookup(lookup)
    room.record.at_once_bytes = lookup.at_once_bytes
    if lookup.at_once_bytes:
        room.record.host = native.address(lookup.host[layers.start])
    given = map(native.address, (selection, line_of, length))
    numbers = (*selection.shape, layers.start, len(layers), step, ticket)
    claimed = _symbol("ess_resolve", 6, 6)(home.at, into.at, room.at, *given, *numbers)
    if claimed == _BAD_POSITION:
        _refuse_positions(lookup, selection, line_of, length)
    return resolved(arena, lookup, split, ticket=ticket, claimed=_accepted(claimed))


def resolved(arena: Arena, lookup: Lookup, split: Split, *, ticket: int, claimed: int) -> FetchPlan:
    """The plan that the latest native `resolve` made, called from Python or from a native layer."""
    lookup.unwritten_count = lookup.native.record.unwritten_count
    claims, is_landed = split.claimed[:, :claimed], bool(lookup.native.record.is_landed)
    claims = claims if is_landed else claims.copy()
    return _planned(arena, split, *claims, ticket=ticket, is_landed=is_landed)


@_twin_of(specification.locate)
def locate(
    arena: Arena, lookup: Lookup, selection: Ints, line_of: Ints, length: Ints, *, out: Ints
) -> int:
    """Writes landed slots to `out`, -1 for other positions; returns the number of these."""
    _assert_positions(selection, line_of, length)
    _assert_ids(2, out)
    assert out.shape == selection.shape, f"selection {selection.shape} into {out.shape}"
    home = arena.native or _bound_arena(arena)
    room = lookup.native or _bound_lookup(lookup)
    given = map(native.address, (selection, line_of, length, out))
    absent = _symbol("ess_locate", 6, 2)(home.at, room.at, *given, *selection.shape)
    if absent == _BAD_POSITION:
        _refuse_positions(lookup, selection, line_of, length)
    return _accepted(absent)


def _assert_positions(selection: Ints, line_of: Ints, length: Ints) -> None:
    _assert_ids(2, selection)
    _assert_ids(1, line_of, length)
    assert line_of.shape == length.shape == selection.shape[:1], "one line and length a query"


def _refuse_positions(lookup: Lookup, selection: Ints, line_of: Ints, length: Ints) -> NoReturn:
    out = np.empty_like(selection)
    specification.translate(selection, lookup.lines, line_of, length, out=out)
    raise AssertionError("the native translation refused what its specification accepts")


@_twin_of(specification.observe)
def observe(
    arena: Arena,
    lookup: Lookup,
    selection: Ints,
    line_of: Ints,
    length: Ints,
    *,
    logits: npt.NDArray[np.float32],
) -> None:
    """Scores each query's first `length` positions from the indexer's logits and its selection."""
    _assert_positions(selection, line_of, length)
    assert arena.eviction.name == "score", f"an arena under {arena.eviction.name} takes no scores"
    assert logits.dtype == np.float32, f"logits are {logits.dtype}, expected float32"
    assert logits.flags.c_contiguous, "logits are not C-contiguous"
    assert len(logits) == len(selection), f"{len(logits)} lines of logits, {len(selection)} queries"
    given = (lookup.lines, line_of, length, selection, logits)
    numbers = (*selection.shape, logits.shape[1], *lookup.lines.shape)
    at = _bound_arena(arena).at
    done = _symbol("ess_observe", 6, 5)(at, *map(native.address, given), *numbers)
    assert done, "a position, a line or a page that is not there"


@_twin_of(specification.claim_new)
def claim_new(arena: Arena, rows: Ints, *, step: int, out: Ints) -> bool:
    """Claims dirty slots for rows that the step will write. False: no room, nothing has changed."""
    _assert_ids(1, rows, out)
    assert out.shape == rows.shape, f"{rows.shape} rows into {out.shape} slots"
    _assert_int32(step, "step")
    call = _symbol("ess_claim_new", 3, 2)
    at = _bound_arena(arena).at
    return bool(_accepted(call(at, native.address(rows), native.address(out), rows.size, step)))


@_twin_of(specification.claim_each)
def claim_each(arenas: Sequence[Arena], rows: Ints, *, step: int, out: Ints, absent: Ints) -> int:
    """`claim_new` in one arena after another until one has no room; returns how many had room.
    Lines of `out` may lie apart."""
    _assert_ids(1, rows, absent)
    assert out.dtype == np.int32, f"{out.dtype} where int32 is expected"
    assert out.strides[1] == out.itemsize, "a line of slots is not in one piece"
    assert out.shape == (len(arenas), rows.size), f"{rows.size} rows into {out.shape} slots"
    assert absent.size == len(arenas), f"{absent.size} counts of {len(arenas)} arenas"
    pointers = map(native.address, (rows, out, absent))
    numbers = len(arenas), rows.size, out.strides[0] // out.itemsize, step
    return _accepted(_symbol("ess_claim_each", 4, 4)(_packed(arenas), *pointers, *numbers))


def addresses(arenas: Sequence[Arena]) -> list[int]:
    """Addresses of these arenas' native records, valid until one of their arrays is replaced."""
    return [(arena.native or _bound_arena(arena)).at for arena in arenas]


def bound(split: Split, lookup: Lookup) -> tuple[int, int]:
    """Addresses of the native records of these two; they stay valid."""
    into, room = split.native or _bound_split(split), lookup.native or _bound_lookup(lookup)
    return into.at, room.at


def copy_at_once(lookup: Lookup, byte_count: int) -> None:
    """Makes later native calls, not made from here, copy claims of at most `byte_count` at once."""
    lookup.at_once_bytes = byte_count
    (lookup.native or _bound_lookup(lookup)).record.at_once_bytes = byte_count


def _packed(arenas: Sequence[Arena]) -> bytes:
    return struct.pack(f"{len(arenas)}q", *addresses(arenas))


def clear_block(arena: Arena, block: int, *, step: int) -> bool:
    """Empties a block, unless one of its rows is held. Native code then looks for free slots
    again."""
    cleared = specification.clear_block(arena, block, step=step)
    arena.native = None
    return cleared


@_twin_of(specification.fill)
def fill(arena: Arena, rows: Ints, *, step: int, ticket: int) -> FetchPlan:
    """Puts absent rows into free slots while there are any, as the oldest of the used rows."""
    return warm(arena, rows, np.full(rows.shape, AGE_MAX, np.int32), step=step, ticket=ticket)


@_twin_of(specification.warm)
def warm(arena: Arena, rows: Ints, ages: Ints, *, step: int, ticket: int) -> FetchPlan:
    """Makes rows resident as if they had been selected `ages` steps ago, newest first."""
    _assert_ids(1, rows, ages)
    assert ages.shape == rows.shape, f"{ages.shape} ages for {rows.shape} rows"
    _assert_int32(ticket, "ticket", lowest=1)
    _assert_int32(step, "step")
    slots, claimed, place = np.empty((3, rows.size), np.int32)
    home = _bound_arena(arena)
    pointers = map(native.address, (rows, ages, slots, claimed, place))
    call = _symbol("ess_warm", 6, 3)
    count = _accepted(call(home.at, *pointers, rows.size, step, ticket))
    return FetchPlan(
        group=arena.group,
        ticket=ticket,
        slots=slots[:count],
        rows=claimed[:count],
        evicted_count=home.record.evicted_count,
    )


@_twin_of(specification.land)
def land(arena: Arena, slots: Ints, *, ticket: int) -> None:
    """The copy `ticket` is complete. A slot that has passed to another copy since keeps it."""
    _assert_ids(1, slots)
    _assert_int32(ticket, "ticket", lowest=1)
    at = _bound_arena(arena).at
    _accepted(_symbol("ess_land", 2, 2)(at, native.address(slots), slots.size, ticket))


@_twin_of(specification.drop)
def drop(arena: Arena, rows: Ints) -> int:
    """Drops these rows in any state; absent rows are ignored. Returns how many were dropped."""
    _assert_ids(1, rows)
    at = _bound_arena(arena).at
    return _accepted(_symbol("ess_drop", 2, 1)(at, native.address(rows), rows.size))


@_twin_of(specification.drop_each)
def drop_each(arenas: Sequence[Arena], rows: Ints) -> list[int]:
    """`drop` in each arena; returns how many rows left each."""
    _assert_ids(1, rows)
    left = np.empty(len(arenas), np.int64)
    homes, call = _packed(arenas), _symbol("ess_drop_each", 3, 2)
    _accepted(call(homes, native.address(rows), native.address(left), len(arenas), rows.size))
    return [int(count) for count in left]


@_twin_of(specification.settle)
def settle(arena: Arena, slots: Ints) -> None:
    """The host copies of these slots are up to date: they are no longer dirty."""
    _assert_ids(1, slots)
    at = _bound_arena(arena).at
    _accepted(_symbol("ess_settle", 2, 1)(at, native.address(slots), slots.size))
