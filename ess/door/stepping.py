"""One step over the pools: begin, append and resolve per layer, commit.

    begin    pages for the new rows; a new age
    append   new rows of a layer into dirty slots: their truth until they are stored
    resolve  a selection becomes hits, misses under way and rows read in place from the host
    seal     accepted rows leave for the host behind the step, rejected ones are gone
    learn    the host takes notice of what was accepted

Seal and learn together are a commit. Between them the device is ahead of the host, so that the next
step may begin before anybody has read what this one accepted: `begin` provides pages for the most
that unlearned steps can have added, and takes its positions from the device's own lengths. The
accepted rows are stored at the end of their own step, not at the head of the next: a sequence that
is in no next step would otherwise need a store of its own, and slots of rejected rows are free for
the next step's claims. Nothing that an unlearned step touches may leave: `Sequence.require`.

Within a group the first call, append or resolve, claims the slots of the step's new rows, before
any selection can age-protect the whole arena: so any arena that holds the new rows is enough. A
group's later layers replay its leader's resolution, whose copies all started with the leader's.
Until a layer has been appended its new positions do not exist for `resolve` (they are past the
length), so a slot without its row cannot be attended by mistake.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import pairwise, starmap

import numpy as np
import numpy.typing as npt

from ess.door import transit
from ess.door.pools import Pools
from ess.door.sequence import Sequence, grow, publish, refresh
from ess.door.step import Resolved, Rows, Step, new_step
from ess.door.workspace import Part, name_host_rows
from ess.errors import BadInput, BadState
from ess.flashtrans.lanes import DoneEvent
from ess.kernels.streams import Event
from ess.pool.lru import planner
from ess.pool.lru.arena import FetchPlan, Lookup

Bytes = npt.NDArray[np.uint8]
Tokens = Many[Many[int]] | None


def begin(pools: Pools, sequences: tuple[Sequence, ...], counts: list[int]) -> Step:
    if len({sequence.number for sequence in sequences}) != len(sequences):
        raise BadInput("a sequence is in the step twice")
    slots_min = min(pools.sparse.slot_count(g) for g in range(pools.layout.group_count))
    if sum(counts) > slots_min:
        raise BadInput(f"{sum(counts)} new rows do not fit a group of {slots_min} slots")
    pools.inflight.settle()
    ends = [_end(pools, *each) for each in zip(sequences, counts, strict=True)]
    grow(pools, zip(sequences, ends, strict=True))
    step = new_step(pools.sparse.begin_step(), sequences, counts, pools.tables)
    for sequence, count in zip(sequences, counts, strict=True):
        sequence.step_numbers = (*sequence.step_numbers, step.number)
        sequence.ahead_count += count
    return step


def _end(pools: Pools, sequence: Sequence, count: int) -> int:
    """How long the sequence can be after a step that brings `count` rows."""
    sequence.require_state("active")
    refresh(pools, sequence)
    limit = sequence.length_max or pools.sizes.length_max
    if count < 1 or sequence.length_bound + count > limit:
        raise BadInput(
            f"sequence {sequence.number}: {count} new rows after {sequence.length_bound}, "
            f"must be at least 1 and end within {limit}"
        )
    return sequence.length_bound + count


def _claim(pools: Pools, step: Step, group: int) -> Rows:
    """The slots of the step's new rows in this group; claimed by the first call that needs them,
    for all groups of the main model together."""
    if group not in step.claimed:
        main = range(pools.layout.main_group_count)
        groups = main if group in main else range(group, group + 1)
        slots = pools.sparse.claim_new(groups, step.rows)
        if len(slots) < len(groups):
            pools.inflight.drain()
            rest = pools.sparse.claim_new(groups[len(slots) :], step.rows)
            slots = np.concatenate([slots, rest])
        assert len(slots) == len(groups), "landed slots are enough for the new rows"
        step.claimed.update(zip(groups, slots, strict=True))
    return step.claimed[group]


def append(
    pools: Pools, step: Step, layer: int, rows: Bytes, keys: Bytes | None, first_query: int
) -> None:
    """The rows of some queries, parts in batch order: no sequence selects another's new row."""
    group, member = pools.layout.place_of(layer)
    queries = _next_part(step, step.row_counts.get(layer, 0), f"layer {layer}", first_query, rows)
    if keys is not None:
        _next_part(step, step.key_counts.get(group, 0), f"group {group}", first_query, keys)
        step.key_counts[group] = queries.stop
    slots, row_ids = _claim(pools, step, group)[queries], step.rows[queries]
    slab = pools.slabs[member]
    transit.write_new(pools, group, row_ids, keys, slab=slab, slots=slots, rows=rows)
    step.row_counts[layer] = queries.stop
    if queries.stop == step.query_count:
        step.appended.add(layer)
        if step.key_counts.get(group) == step.query_count:
            step.keyed.add(group)


def _next_part(step: Step, so_far: int, name: str, first: int, rows: Bytes) -> slice:
    if so_far == step.query_count:
        raise BadState(f"{name} was appended in step {step.number} already")
    if first != so_far:
        raise BadState(f"{name} has {so_far} queries appended, the next part starts at {first}")
    return slice(first, first + len(rows))


def resolve(
    pools: Pools, step: Step, group: int, selection: Rows, first_query: int, part: Part
) -> FetchPlan:
    layer = pools.layout.groups[group][0]
    if (group, first_query) in step.resolved:
        raise BadState(f"layer {layer}, queries from {first_query}: resolved already")
    lookup, queries = part.lookup, slice(first_query, first_query + len(selection))
    lines, lengths = step.query_line[queries], step.lengths(layer)[queries]
    if group not in step.claimed:
        rows = lookup.rows[: len(selection)]
        planner.translate(selection, lookup.lines, lines, lengths, out=rows)  # or nothing changes
        _claim(pools, step, group)
    plan = pools.sparse.resolve(group, lookup, selection, lines, lengths, part.split)
    if plan.place_count or lookup.unwritten_count:
        _refuse_unwritten(pools, plan, part, len(selection))
    if plan.place_count:
        name_host_rows(part.split, len(selection), pools.index)
    if plan.is_landed:
        times = lookup.times[: len(pools.layout.groups[group]) + 1].tolist()
        events: tuple[Event | None, ...] = tuple(starmap(DoneEvent, pairwise(times)))
    else:
        events = transit.start_fetch(pools, plan, lookup.host_rows[: len(plan.rows)])
    step.resolved[group, first_query] = Resolved(
        plan=plan,
        part=part,
        query_count=len(selection),
        may_name_new=step.row_counts.get(layer, 0) > first_query,
        events=events,
    )
    return plan


def locate(pools: Pools, step: Step, layer: int, selection: Rows, queries: Rows) -> Rows:
    """Slots of the selected rows that are resident, -1 for all others; nobody is stamped."""
    rows = np.empty_like(selection)
    lines, lengths = step.query_line[queries], step.lengths(layer)[queries]
    planner.translate(selection, pools.tables.lines, lines, lengths, out=rows)
    group = pools.layout.group_of(layer)
    _claim(pools, step, group)
    return pools.sparse.locate(group, rows)


def locate_into(
    pools: Pools,
    step: Step,
    layer: int,
    selection: Rows,
    first_query: int,
    *,
    lookup: Lookup,
    out: Rows,
) -> int:
    """`locate` for consecutive queries; returns how many positions are not resident."""
    group = pools.layout.group_of(layer)
    queries = slice(first_query, first_query + len(selection))
    lines, lengths = step.query_line[queries], step.lengths(layer)[queries]
    if group not in step.claimed:
        planner.translate(selection, lookup.lines, lines, lengths, out=out)
        _claim(pools, step, group)
    return pools.sparse.locate_into(out, group, lookup, selection, lines, lengths)


def host_codes(pools: Pools, step: Step, layer: int, selection: Rows, first_query: int) -> Rows:
    """Codes that read the truth: -2 - host row, or the slot of a row that is newer than its host.

    What attends these codes depends on no residency decision: verify mode compares with it.
    """
    rows = np.empty_like(selection)
    queries = slice(first_query, first_query + len(selection))
    lines, lengths = step.query_line[queries], step.lengths(layer)[queries]
    planner.translate(selection, pools.tables.lines, lines, lengths, out=rows)
    codes = np.full_like(rows, -1)
    chosen = rows >= 0
    codes[chosen] = -2 - pools.index.host_rows(rows[chosen])
    slots = pools.sparse.locate(pools.layout.group_of(layer), rows)
    newer = (slots >= 0) & pools.sparse.is_dirty(slots)
    codes[newer] = slots[newer]
    return codes


def _refuse_unwritten(pools: Pools, plan: FetchPlan, part: Part, query_count: int) -> None:
    """Rows nobody ever wrote cannot be fetched: give their slots up again and say which."""
    place = part.split.place[:query_count]
    wanted = np.concatenate([plan.rows, place[place >= 0]]) if plan.place_count else plan.rows
    try:
        transit.check_stored(pools, plan.group, pools.index.host_rows(wanted))
    except BadState:
        pools.sparse.drop([plan.group], plan.rows)
        raise


def resolved(step: Step, layer: int, key: tuple[int, int]) -> Resolved:
    """The leader's answer, good for every layer of the group; each waits for its own copy."""
    found = step.resolved[key]
    if found.may_name_new and step.row_counts.get(layer, 0) < key[1] + found.query_count:
        raise BadState(f"layer {layer}: append its new rows first, the selection may name them")
    return found


def seal(pools: Pools, step: Step, accepted: list[int]) -> dict[int, int]:
    """The device's half of a commit; returns the bytes that each group sends to the host."""
    _require_complete(pools, step, accepted)
    for one in step.resolved.values() if pools.inflight.pending_count else ():
        for event in one.events if one.plan.is_pending else ():
            assert event is not None, "a plan that is pending has an event for every layer"
            pools.inflight.settle_until(event)
    kept = step.query_offset < np.repeat(np.array(accepted, np.int32), step.query_counts)
    layers_of, row_bytes = pools.layout.groups, pools.layout.row_bytes * sum(accepted)
    groups = [g for g in step.claimed if step.appended.issuperset(layers_of[g])]
    stored = {group: row_bytes * len(layers_of[group]) for group in groups}
    if 0 < sum(stored.values()) <= pools.at_once_bytes:
        transit.seal_at_once(pools, step, groups, kept)
        for sequence in step.sequences:
            publish(pools, sequence)
    else:
        _store(pools, step, groups, kept)
        _drop(pools, groups, step.rows[~kept])
    _drop(pools, [group for group in step.claimed if group not in stored], step.rows)
    lines = [sequence.line for sequence in step.sequences]
    pools.tables.lengths[lines] += np.array(accepted, np.int32)
    return stored


def _drop(pools: Pools, groups: list[int], rows: Rows) -> None:
    if groups and len(rows):
        pools.sparse.drop(groups, rows)


def learn(pools: Pools, step: Step, accepted: list[int], tokens: Tokens) -> None:
    """The host's half of a commit. Steps of a sequence are learned in their order."""
    check_tokens(step, accepted, tokens)
    for index, sequence in enumerate(step.sequences):
        assert sequence.step_numbers[0] == step.number, "steps are learned in order"
        if tokens is not None and len(sequence.tokens) >= sequence.length:
            known_count = len(sequence.tokens) - sequence.length
            sequence.tokens.extend(int(token) for token in tokens[index][known_count:])
        sequence.length += accepted[index]
        sequence.ahead_count -= step.query_counts[index]
        sequence.step_numbers = sequence.step_numbers[1:]
        assert sequence.ahead_count >= 0, "rows were learned that no step brought"
        publish(pools, sequence)


def _require_complete(pools: Pools, step: Step, accepted: list[int]) -> None:
    """Accepted rows exist in every main layer; the MTP layer may lag."""
    missing = set(range(pools.layout.layer_count)) - step.appended
    if missing and any(accepted):
        raise BadState(
            f"step {step.number} accepts rows but {len(missing)} layers were not appended, "
            f"the first is layer {min(missing)}"
        )


def check_tokens(step: Step, accepted: list[int], tokens: Tokens) -> None:
    """What the kept rows were computed from must match what is known."""
    if tokens is None:
        return
    if [len(ids) for ids in tokens] != accepted:
        raise BadInput(f"tokens have lengths {[len(ids) for ids in tokens]}, accepted {accepted}")
    for sequence, ids in zip(step.sequences, tokens, strict=True):
        known = sequence.tokens[sequence.length : sequence.length + len(ids)]
        if known != [int(token) for token in ids[: len(known)]]:
            raise BadInput(
                f"sequence {sequence.number}: tokens differ from those it was opened with"
            )


def _store(pools: Pools, step: Step, groups: list[int], kept: npt.NDArray[np.bool_]) -> None:
    """Send the kept rows home; they are stored, and clean, when the copy has landed."""
    slots_of = {group: step.claimed[group][kept] for group in groups}
    layers = [layer for group in groups for layer in pools.layout.groups[group]]
    if layers and kept.any():
        rows = step.rows[kept]
        to_host = pools.index.host_rows(rows)
        _store_keys(pools, sorted(step.keyed), rows, to_host)

        def stored() -> None:
            pools.sparse.settle(np.concatenate(list(slots_of.values())))
            pools.latent.mark_rows(layers, to_host)
            for sequence in step.sequences:
                publish(pools, sequence)

        pools.inflight.submit([transit.store_copy(pools, slots_of, to_host)], stored)


def _store_keys(pools: Pools, keyed: list[int], rows: Rows, to_host: Rows) -> None:
    if keyed:
        pools.latent.keys.copy_keys(pools.index.keys, rows, to_host, layers=keyed)
        pools.latent.mark_keys(keyed, to_host)
