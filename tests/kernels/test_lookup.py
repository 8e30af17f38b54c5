"""Positions looked up by native code against the specification: the same arrays, bit for bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ess.errors import BadInput
from ess.pool.lru import planner, specification
from ess.pool.lru.arena import Arena, Lookup, Split
from tests.support.built import needs_native

SPLIT = ("slots", "hit", "miss", "place", "hit_count", "miss_count", "place_count")
LAYERS = 3
QUERIES, WIDTH = 4, 24
ROW_BYTES = 20


def ids(values):
    return np.array(values, np.int32)


def two_worlds(rng, at_once_bytes=0):
    """The same lines of pages, stored bits, rows and empty arena, for either implementation."""
    pages = rng.permutation(20)[:15].astype(np.int32).reshape(3, 5)
    host_page_of = np.full(20, -1, np.int32)
    host_page_of[pages.reshape(-1)] = rng.permutation(30)[:15]
    stored = np.full((LAYERS, 30), 2**64 - 1, np.uint64)
    stored[1, host_page_of[pages[0, 0]]] ^= np.uint64(1 << 63)
    host = rng.integers(0, 256, (LAYERS, 30 * 64, ROW_BYTES), np.uint8)
    for operations in (specification, planner):
        rows = np.full((QUERIES + 1, WIDTH), 77, np.int32)
        lookup = Lookup(
            lines=pages.copy(),
            host_page_of=host_page_of.copy(),
            stored=stored.copy(),
            rows=rows,
            host_rows=np.full(rows.size, 77, np.int32),
            host=host,
            slab=np.zeros((64 * LAYERS, ROW_BYTES), np.uint8),
            times=np.zeros(LAYERS + 1, np.int64),
            at_once_bytes=at_once_bytes,
        )
        arena = Arena.alone(row_count=20 * 64, slot_count=64)
        yield operations, lookup, arena, Split.create(query_count=QUERIES + 1, top_k=WIDTH)


def copy_at_once(lookup, arena, claims, layers):
    """What the native call adds to a decision: small claims, all there, are copied and landed."""
    size = claims.rows.size * len(layers) * ROW_BYTES
    is_open = not lookup.unwritten_count and not claims.late_ticket
    if not is_open or not 0 < size <= lookup.at_once_bytes:
        return claims
    for member, layer in enumerate(layers):
        rows = lookup.host[layer, lookup.host_rows[: claims.rows.size]]
        lookup.slab[claims.slots + member * 64] = rows
    specification.land(arena, claims.slots, ticket=claims.ticket)
    return replace(claims, is_landed=True)


def positions(rng):
    chosen = [np.sort(rng.choice(200, WIDTH - 4, replace=False)) for _ in range(QUERIES)]
    return np.pad(chosen, ((0, 0), (0, 4)), constant_values=-1).astype(np.int32)


@needs_native
def test_any_number_of_positions_is_located_alike():
    """Native code takes sixteen at a time; some rows are in flight, some absent, some were left."""
    rng = np.random.default_rng(11)
    worlds, chosen = list(two_worlds(rng)), positions(rng)
    lines, lengths = ids([0, 0, 1, 2]), ids([200, 201, 202, 320])
    for operations, lookup, arena, split in worlds:
        claims = operations.resolve(
            arena, lookup, chosen, lines, lengths, layers=range(1), step=300, ticket=1, split=split
        )
        assert len(claims.slots) > 40
        operations.land(arena, claims.slots[::2].copy(), ticket=1)
        operations.drop(arena, claims.rows[::5].copy())
    seen = set()
    for queries in range(1, QUERIES + 1):
        for width in range(1, WIDTH + 1):
            some, answers = np.ascontiguousarray(chosen[:queries, -width:]), []
            for operations, lookup, arena, _ in worlds:
                out = np.full_like(some, 77)
                given = lookup, some, lines[:queries], lengths[:queries]
                answers.append((operations.locate(arena, *given, out=out), out.tolist()))
            assert answers[0] == answers[1]
            seen.add(answers[0][0])
    assert len(seen) > 20


@needs_native
@pytest.mark.parametrize("at_once_bytes", [0, 40 * LAYERS * ROW_BYTES])
def test_positions_resolve_and_locate_as_their_specification_says(at_once_bytes):
    seen = Counter()
    rng = np.random.default_rng(5)
    worlds = list(two_worlds(rng, at_once_bytes))
    lines, lengths = ids([0, 0, 1, 2]), ids([200, 201, 202, 320])
    for step in range(300, 330):
        selection, answers = positions(rng), []
        for operations, lookup, arena, split in worlds:
            out, layers = np.empty_like(selection), range(step % 2, LAYERS)
            claims = operations.resolve(
                arena,
                lookup,
                selection,
                lines,
                lengths,
                layers=layers,
                step=step,
                ticket=step,
                split=split,
            )
            if operations is specification:
                assert not claims.is_landed
                assert not lookup.times.any()
                claims = copy_at_once(lookup, arena, claims, layers)
            elif claims.is_landed:
                assert lookup.times[0] > 0
                assert (np.diff(lookup.times[: len(layers) + 1]) >= 0).all()
            hidden = operations.locate(arena, lookup, selection, lines, lengths, out=out)
            in_flight = out.copy()
            operations.land(arena, claims.slots.copy(), ticket=step)
            absent = operations.locate(arena, lookup, selection, lines, lengths, out=out)
            source = lookup.host_rows[: len(claims.rows)].copy()
            answers.append(
                [claims.slots.copy(), claims.rows.copy(), source, lookup.rows, in_flight, out]
                + [lookup.unwritten_count, hidden, absent, claims.place_count]
                + [claims.is_landed, lookup.slab.copy(), arena.ticket_of.copy()]
                + [getattr(split, name) for name in SPLIT]
            )
            assert hidden >= absent == ((out < 0) & (selection >= 0)).sum()
            assert claims.is_landed or hidden > absent
            if claims.is_landed:
                assert not lookup.unwritten_count
                for member, layer in enumerate(layers):
                    copied = lookup.slab[claims.slots + member * 64]
                    assert (copied == lookup.host[layer, source]).all()
            seen["landed", claims.is_landed] += 1
            seen["unwritten"] += lookup.unwritten_count
            seen["placed"] += claims.place_count
            assert (source % 64 == claims.rows % 64).all()
            assert (source // 64 == lookup.host_page_of[claims.rows // 64]).all()
        for each, other in zip(*answers, strict=True):
            np.testing.assert_array_equal(each, other)
    assert seen["landed", False]
    assert bool(seen["landed", True]) == (at_once_bytes > 0)
    assert seen["unwritten"]
    assert seen["placed"]


def test_the_specification_decides_and_moves_nothing():
    """With as many bytes allowed as there are: it neither writes a row nor reads a clock."""
    _, lookup, arena, split = next(two_worlds(np.random.default_rng(0), at_once_bytes=1 << 30))
    for array in (lookup.host, lookup.slab, lookup.times):
        array.flags.writeable = False
    selection = np.full((1, WIDTH), -1, np.int32)
    selection[0, :2] = [3, 120]
    own = {"layers": range(LAYERS), "step": 300, "ticket": 7, "split": split}
    lines, lengths = ids([0]), ids([130])
    claims = specification.resolve(arena, lookup, selection, lines, lengths, **own)
    assert (claims.is_pending, claims.is_landed) == (True, False)
    assert (arena.ticket_of[claims.slots] == 7).all()


@needs_native
def test_claims_that_are_still_to_be_copied_outlive_the_next_plan():
    _, (_, lookup, arena, split) = two_worlds(np.random.default_rng(0))
    plans = []
    for ticket, position in enumerate((3, 120), start=1):
        selection = np.full((1, WIDTH), -1, np.int32)
        selection[0, 0] = position
        own = {"layers": range(LAYERS), "step": 300, "ticket": ticket, "split": split}
        plans.append(planner.resolve(arena, lookup, selection, ids([0]), ids([130]), **own))
    assert [plan.is_pending for plan in plans] == [True, True]
    for plan in plans:
        assert (arena.slot_of[plan.rows] == plan.slots).all()
        assert (arena.ticket_of[plan.slots] == plan.ticket).all()
    assert plans[0].rows != plans[1].rows


@needs_native
@pytest.mark.parametrize("name", ["resolve", "locate"])
def test_a_bad_position_claims_nothing(name):
    sentences = []
    for operations, lookup, arena, split in two_worlds(np.random.default_rng(0)):
        selection = np.full((1, WIDTH), -1, np.int32)
        selection[0, :2] = [3, 130]
        own = {"out": np.empty_like(selection)}
        if name == "resolve":
            own = {"layers": range(LAYERS), "step": 300, "ticket": 1, "split": split}
        with pytest.raises(BadInput, match=r"selection\[0, 1\]") as refused:
            getattr(operations, name)(arena, lookup, selection, ids([0]), ids([130]), **own)
        sentences.append(str(refused.value))
        assert (arena.row_of == -1).all()
        assert (arena.slot_of == -1).all()
    assert sentences[0] == sentences[1]
