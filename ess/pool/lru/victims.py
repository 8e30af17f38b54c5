"""Which slots give way, by policy: the specification of the order that `eviction` describes."""

from __future__ import annotations

from typing import Any, Final, assert_never

import numpy as np
import numpy.typing as npt

from ess.array_types import Ints
from ess.pool.lru.arena import AGE_FREE, AGE_MAX, Arena
from ess.pool.lru.eviction import Longs

_SECOND_ROUND: Final = 1 << 62
_WRAPPED: Final = 1 << 61
_FREE: Final = -AGE_FREE


def age(arena: Arena, slots: npt.NDArray[Any], step: int) -> Ints:
    since = step - arena.last_use[slots]
    assert (since[arena.row_of[slots] >= 0] >= 0).all(), f"a slot was used after step {step}"
    ages: Ints = np.where(arena.row_of[slots] < 0, AGE_FREE, np.minimum(since, AGE_MAX))
    return ages


def oldest(arena: Arena, *, step: int, wanted: int) -> Ints:
    """The first `wanted` victims by age, whatever the policy."""
    slots, ages = _eligible(arena, step, wanted)
    return _first(slots, -ages, wanted)


def victims(arena: Arena, *, step: int, wanted: int) -> Ints:
    """The first `wanted` victims in the policy's order. Changes nothing."""
    slots, ages = _eligible(arena, step, wanted)
    policy = arena.eviction.name
    if policy == "lru":
        return _first(slots, -ages, wanted)
    if policy == "score":
        standing = arena.eviction.rank_of[arena.row_of[slots]].astype(np.int64) >> 8
    elif policy == "sieve":
        spared = ~_is_visited(arena, slots)
        standing = _walk(arena, slots) + np.where(spared, 0, _SECOND_ROUND)
    else:
        assert_never(policy)
    return _first(slots, np.where(ages == AGE_FREE, _FREE, standing), wanted)


def pass_by(arena: Arena, taken: Ints, *, step: int) -> None:
    """Moves SIEVE's hand to the last of these victims, which still hold their rows."""
    taken = taken[arena.row_of[taken] >= 0]
    if arena.eviction.name != "sieve" or not taken.size:
        return
    held = arena.slots[arena.row_of[arena.slots] >= 0]
    last, came = taken[-1:], arena.eviction.came
    passed = held
    if not _is_visited(arena, last)[0]:
        passed = held[_walk(arena, held) < _walk(arena, last)]
    arena.eviction.spared[passed] = step
    is_newest = int(came[held].max()) == int(came[last][0])
    arena.eviction.hand[0] = 0 if is_newest else came[last][0] + 1


def admit(arena: Arena, slots: Ints) -> None:
    """Records new rows in these slots, in the order in which SIEVE is to meet them."""
    eviction = arena.eviction
    if eviction.name == "sieve":
        eviction.came[slots] = eviction.hand[1] + np.arange(slots.size)
        eviction.spared[slots] = arena.last_use[slots]
        eviction.hand[1] += slots.size


def _eligible(arena: Arena, step: int, wanted: int) -> tuple[npt.NDArray[np.int64], Ints]:
    if wanted == 0:
        return np.empty(0, np.int64), np.empty(0, np.int32)
    slots = arena.slots
    ages = age(arena, slots, step).astype(np.int32)
    bound = (arena.dirty[slots] != 0) | (arena.ticket_of[slots] != 0)
    eligible = (ages == AGE_FREE) | ((ages >= 1) & ~bound)
    return slots[eligible], ages[eligible]


def _first(slots: npt.NDArray[np.int64], standing: npt.NDArray[Any], wanted: int) -> Ints:
    chosen: Ints = slots[np.argsort(standing, kind="stable")[:wanted]].astype(np.int32)
    return chosen


def _is_visited(arena: Arena, slots: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    visited: npt.NDArray[np.bool_] = arena.last_use[slots] > arena.eviction.spared[slots]
    return visited


def _walk(arena: Arena, slots: npt.NDArray[Any]) -> Longs:
    """How far the hand is from each slot; after the newest it goes on from the oldest."""
    distance: Longs = arena.eviction.came[slots] - arena.eviction.hand[0]
    distance[distance < 0] += _WRAPPED
    return distance
