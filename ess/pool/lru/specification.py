"""Residency in one arena: the specification, in NumPy, in the order it is argued.

The age of a used slot is min(step - last use, 255); a free slot counts as 256. Age 0 means that
this step selected the row, in this part or in an earlier one. A victim is a free slot, or one of
age >= 1 that is neither dirty nor in flight. Under LRU, the default, victims go in the order (age
descending, slot ascending): the oldest first, and among equals the lowest slot, so that every
implementation, with any number of threads, picks the same ones. `eviction` has the other policies,
which differ in that order alone.

A plan first stamps every resident row of its selection, then looks for victims. So no row that any
query of the call selected can give way to a row of the same call, and the order of queries decides
only which missing row takes which victim. When victims run out the remaining rows get no slot and
are served in place from the host: a plan never fails, whatever the size of the arena.

Nothing here copies a row or reads a clock: a plan says what is to be copied. The native twin of
`resolve` may copy its claims in the same call (ADR 7).

A row is published (slot_of, row_of) when it is claimed, before its copy has landed; its ticket
names that copy. A later part of the step that selects it finds it *late*: nothing is fetched
twice, but its attention must wait for the ticket, so the entry goes to the miss side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ess.array_types import Ints
from ess.errors import BadInput
from ess.pool.lru.arena import AGE_MAX, BLOCK_SLOTS, Arena, FetchPlan, Lookup, Split
from ess.pool.lru.arena import check as check
from ess.pool.lru.eviction import follow, scored
from ess.pool.lru.victims import admit, age, oldest, pass_by
from ess.pool.lru.victims import victims as claimable
from ess.units import PAGE_ROWS


def translate(
    selection: Ints, page_table: Ints, table_row: Ints, length: Ints, *, out: Ints
) -> None:
    """Positions [Q, k] to row ids through each query's page table; -1 stays -1.

    Positions ascend, with only -1 behind the last: a repeated position would be attended twice.
    """
    assert selection.shape == out.shape, f"selection {selection.shape} into {out.shape}"
    assert table_row.shape == length.shape == selection.shape[:1], "one table and length a query"
    assert _within(length, 0, page_table.shape[1] * PAGE_ROWS + 1), "a length beyond its table"
    assert _within(table_row, 0, page_table.shape[0]), "a table row outside the page table"
    position = np.maximum(selection, 0)
    context = [f"of {int(count)} tokens" for count in length]
    wrong = (selection < -1) | (selection >= length[:, None])
    _refuse(selection, wrong, "is outside its context", context)
    page = page_table[table_row[:, None], position // PAGE_ROWS]
    _refuse(selection, (selection >= 0) & (page < 0), "lies in a page without an id", context)
    after_pad = np.zeros(selection.shape, np.bool_)
    after_pad[:, 1:] = (selection[:, :-1] == -1) & (selection[:, 1:] >= 0)
    _refuse(selection, after_pad, "comes behind a -1: -1 only at the end", [""] * len(length))
    falling = np.zeros(selection.shape, np.bool_)
    falling[:, 1:] = (selection[:, 1:] <= selection[:, :-1]) & (selection[:, 1:] >= 0)
    _refuse(selection, falling, "is not above the position before it", [""] * len(length))
    out[:] = np.where(selection < 0, -1, page * PAGE_ROWS + position % PAGE_ROWS)


def _refuse(
    selection: Ints, wrong: npt.NDArray[np.bool_], why: str, context: Sequence[str]
) -> None:
    if wrong.any():
        query, column = (int(i) for i in np.argwhere(wrong)[0])
        position = int(selection[query, column])
        text = f"selection[{query}, {column}] is position {position}, which {why} {context[query]}"
        raise BadInput(text.rstrip())


def plan(arena: Arena, rows: Ints, *, step: int, ticket: int, split: Split) -> FetchPlan:
    """Stamps resident rows, claims slots for the others, and says where every entry is.

    `hit_age` counts each row that is found landed, once per step, at the age it had: its stamp then
    gives it age 0, which is not counted, nor are late rows and rows claimed in this step.
    """
    _assert_rows(arena, rows, lowest=-1)
    assert rows.ndim == 2, f"rows of {rows.ndim} dimensions, expected [queries, top_k]"
    assert split.holds(rows.shape), f"rows {rows.shape}, split {split.slots.shape}"
    assert ticket > 0, f"ticket {ticket}, must be positive"
    slot = np.where(rows >= 0, arena.slot_of[rows], -1)
    resident = slot >= 0
    late = resident & (arena.ticket_of[slot] != 0)
    hit = resident & ~late
    _count_ages(arena, slot[hit], step)
    arena.last_use[slot[resident]] = step

    absent = (rows >= 0) & ~resident
    missing = _first_occurrences(rows[absent])
    victims = claimable(arena, step=step, wanted=missing.size)
    missing = missing[: victims.size]
    pass_by(arena, victims, step=step)
    late_ticket = int(arena.ticket_of[slot[late]].max(initial=0))
    evicted = _hand_over(arena, victims, missing, last_use=step, ticket=ticket)
    admit(arena, victims)

    slot[absent] = arena.slot_of[rows[absent]]
    place = absent & (slot < 0)
    query_count, width = rows.shape
    split.slots[:query_count, :width] = np.where(place, -2 - rows, slot)
    _compact(slot, hit, split.hit, split.hit_count)
    _compact(slot, late | (absent & ~place), split.miss, split.miss_count)
    _compact(rows, place, split.place, split.place_count)
    return FetchPlan(
        group=arena.group,
        ticket=ticket,
        slots=victims,
        rows=missing,
        hit_count=int(hit.sum()),
        place_count=int(place.sum()),
        late_ticket=late_ticket,
        evicted_count=evicted,
    )


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

    Copies nothing: the claims stay in flight, whatever `at_once_bytes` says.
    """
    rows = lookup.rows[: len(selection)]
    translate(selection, lookup.lines, line_of, length, out=rows)
    fetch = plan(arena, rows, step=step, ticket=ticket, split=split)
    page, offset = lookup.host_page_of[fetch.rows // PAGE_ROWS], fetch.rows % PAGE_ROWS
    assert (page >= 0).all(), "a row of a page that is not active"
    lookup.host_rows[: page.size] = page * PAGE_ROWS + offset
    common = np.bitwise_and.reduce(lookup.stored[layers.start : layers.stop, page], axis=0)
    is_written = (common >> offset.astype(np.uint64)) & np.uint64(1)
    lookup.unwritten_count = page.size - int(is_written.sum())
    return fetch


def locate(
    arena: Arena, lookup: Lookup, selection: Ints, line_of: Ints, length: Ints, *, out: Ints
) -> int:
    """Writes landed slots to `out`, -1 for other positions; returns the number of these."""
    translate(selection, lookup.lines, line_of, length, out=out)
    _assert_rows(arena, out, lowest=-1)
    slot = np.where(out >= 0, arena.slot_of[out], -1)
    out[:] = np.where(arena.ticket_of[slot] == 0, slot, -1)
    return int(((selection >= 0) & (out < 0)).sum())


def observe(
    arena: Arena,
    lookup: Lookup,
    selection: Ints,
    line_of: Ints,
    length: Ints,
    *,
    logits: npt.NDArray[np.float32],
) -> None:
    """Scores each query's first `length` positions from the indexer's logits and its selection.

    Queries take effect in their order, one after another.
    """
    assert arena.eviction.name == "score", f"an arena under {arena.eviction.name} takes no scores"
    assert len(logits) == len(selection) == len(line_of) == len(length), "one line a query"
    assert _within(length, 0, logits.shape[1] + 1), "a length beyond its logits"
    assert _within(length, 0, lookup.lines.shape[1] * PAGE_ROWS + 1), "a length beyond its table"
    for query, count in enumerate(length.tolist()):
        assert _within(selection[query], -1, count), f"query {query} selects beyond its context"
        position = np.arange(count)
        page = lookup.lines[line_of[query], position // PAGE_ROWS]
        assert _within(page, 0, arena.slot_of.size // PAGE_ROWS), "a page without an id"
        scores = scored(logits[query, :count], selection[query])
        follow(arena.eviction.rank_of, page * PAGE_ROWS + position % PAGE_ROWS, scores)


def claim_new(arena: Arena, rows: Ints, *, step: int, out: Ints) -> bool:
    """Claims dirty slots for rows that the step will write. False: no room, nothing has changed."""
    _assert_distinct(arena, rows)
    assert out.shape == rows.shape, f"{rows.shape} rows into {out.shape} slots"
    slot = arena.slot_of[rows]
    resident, absent = slot[slot >= 0], rows[slot < 0]
    assert not arena.ticket_of[resident].any(), "a row to be written is still being fetched"
    before = arena.last_use[resident]
    arena.last_use[resident] = step
    victims = claimable(arena, step=step, wanted=absent.size)
    if victims.size < absent.size:
        arena.last_use[resident] = before
        return False
    pass_by(arena, victims, step=step)
    _hand_over(arena, victims, absent, last_use=step, ticket=0)
    admit(arena, victims)
    out[:] = arena.slot_of[rows]
    arena.dirty[out] = 1
    return True


def claim_each(arenas: Sequence[Arena], rows: Ints, *, step: int, out: Ints, absent: Ints) -> int:
    """`claim_new` in one arena after another until one has no room. Returns how many had room;
    `absent` gets how many rows were new to each of these."""
    for number, arena in enumerate(arenas):
        absent[number] = np.count_nonzero(arena.slot_of[rows] < 0)
        if not claim_new(arena, rows, step=step, out=out[number]):
            return number
    return len(arenas)


def fill(arena: Arena, rows: Ints, *, step: int, ticket: int) -> FetchPlan:
    """Puts absent rows into free slots while there are any, as the oldest of the used rows."""
    return warm(arena, rows, np.full(rows.shape, AGE_MAX, np.int32), step=step, ticket=ticket)


def warm(arena: Arena, rows: Ints, ages: Ints, *, step: int, ticket: int) -> FetchPlan:
    """Makes rows resident as if they had been selected `ages` steps ago, newest first.

    All resident rows are stamped first. An absent row takes the next victim while that is older
    than itself; ages ascend and victims descend, so after the first refusal there is no other. This
    goes by age under every policy.
    """
    _assert_distinct(arena, rows)
    assert ages.shape == rows.shape, f"{ages.shape} ages for {rows.shape} rows"
    assert (np.diff(ages, prepend=1) >= 0).all(), "ages must ascend from 1"
    assert ticket > 0, f"ticket {ticket}, must be positive"
    slot = arena.slot_of[rows]
    resident, absent = slot[slot >= 0], slot < 0
    arena.last_use[resident] = np.maximum(arena.last_use[resident], step - ages[~absent])
    rows, ages = rows[absent], ages[absent]
    victims = oldest(arena, step=step, wanted=rows.size)
    rows, ages = rows[: victims.size], ages[: victims.size]
    older = age(arena, victims, step) > np.minimum(ages, AGE_MAX)
    victims, rows = victims[older], rows[older]
    evicted = _hand_over(arena, victims, rows, last_use=step - ages[older], ticket=ticket)
    admit(arena, victims[::-1])
    return FetchPlan(
        group=arena.group, ticket=ticket, slots=victims, rows=rows, evicted_count=evicted
    )


def land(arena: Arena, slots: Ints, *, ticket: int) -> None:
    """The copy `ticket` is complete. A slot that has passed to another copy since keeps it."""
    assert ticket > 0, f"ticket {ticket}, must be positive"
    assert _within(slots, 0, arena.row_of.size), "a slot outside the slab"
    arena.ticket_of[slots[arena.ticket_of[slots] == ticket]] = 0


def settle(arena: Arena, slots: Ints) -> None:
    """The host copies of these slots are up to date: they are no longer dirty."""
    assert _within(slots, 0, arena.row_of.size), "a slot outside the slab"
    assert (arena.row_of[slots] >= 0).all(), "a free slot cannot be settled"
    arena.dirty[slots] = 0


def drop(arena: Arena, rows: Ints) -> int:
    """These rows leave, whatever their state; absent ones are ignored. Returns how many left."""
    _assert_rows(arena, rows, lowest=0)
    slot = np.unique(arena.slot_of[rows])
    slot = slot[slot >= 0]
    if arena.eviction.name == "score":
        arena.eviction.rank_of[rows] = 0
    arena.slot_of[rows] = -1
    arena.row_of[slot] = -1
    arena.dirty[slot] = 0
    arena.ticket_of[slot] = 0
    return slot.size


def drop_each(arenas: Sequence[Arena], rows: Ints) -> list[int]:
    return [drop(arena, rows) for arena in arenas]


def clear_block(arena: Arena, block: int, *, step: int) -> bool:
    """All rows of a block leave, so that another group may own it. False: nothing has changed."""
    assert block in arena.blocks, f"block {block} is not owned by this group"
    slots = np.arange(block, block + BLOCK_SLOTS)
    slots = slots[arena.row_of[slots] >= 0]
    if arena.dirty[slots].any() or arena.ticket_of[slots].any():
        return False
    if (age(arena, slots, step) == 0).any():
        return False
    drop(arena, arena.row_of[slots])
    return True


def _hand_over(arena: Arena, slots: Ints, rows: Ints, *, last_use: Any, ticket: int) -> int:
    """Gives victims to new rows; returns how many rows lost a slot by it."""
    assert slots.shape == rows.shape, f"{slots.size} victims for {rows.size} rows"
    before = arena.row_of[slots]
    assert not arena.dirty[slots].any(), "a dirty row was to give way"
    arena.slot_of[before[before >= 0]] = -1
    arena.slot_of[rows] = slots
    arena.row_of[slots] = rows
    arena.last_use[slots] = last_use
    arena.ticket_of[slots] = ticket
    return int((before >= 0).sum())


def _count_ages(arena: Arena, hits: Ints, step: int) -> None:
    seen = np.zeros(arena.row_of.size, bool)
    seen[hits] = True
    ages = age(arena, np.flatnonzero(seen), step)
    arena.hit_age += np.bincount(ages[ages > 0], minlength=AGE_MAX + 1)


def _first_occurrences(values: Ints) -> Ints:
    _, first = np.unique(values, return_index=True)
    distinct: Ints = values[np.sort(first)]
    return distinct


def _compact(values: Ints, keep: npt.NDArray[np.bool_], out: Ints, count: Ints) -> None:
    query_count, width = values.shape
    query, column = np.nonzero(keep)
    per_query = keep.sum(axis=1, dtype=np.int32)
    start = np.cumsum(per_query) - per_query
    out[:query_count, :width] = -1
    out[query, np.arange(query.size) - start[query]] = values[query, column]
    count[:query_count] = per_query


def _within(values: npt.NDArray[Any], lowest: int, bound: int) -> bool:
    return values.size == 0 or (int(values.min()) >= lowest and int(values.max()) < bound)


def _assert_rows(arena: Arena, rows: Ints, *, lowest: int) -> None:
    assert rows.dtype == np.int32, f"row ids are {rows.dtype}, expected int32"
    assert _within(rows, lowest, arena.slot_of.size), (
        f"row ids must lie in [{lowest}, {arena.slot_of.size})"
    )


def _assert_distinct(arena: Arena, rows: Ints) -> None:
    assert rows.ndim == 1, f"rows of {rows.ndim} dimensions, expected one"
    _assert_rows(arena, rows, lowest=0)
    assert np.unique(rows).size == rows.size, "a row is named twice"
