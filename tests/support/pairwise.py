"""Covering arrays: few cases in which every pair of values of any two factors meets."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

Case = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


NONE: AbstractSet[Pair] = frozenset()


def pairwise(
    factors: Mapping[str, Sequence[str]], *, barred: AbstractSet[Pair] = NONE
) -> list[Case]:
    """Greedy: each case starts at a pair not met yet and takes, factor by factor, what meets most.
    Barred pairs meet in no case.

    >>> len(pairwise({"a": "01", "b": "01", "c": "01"}))
    4
    >>> len(pairwise({"a": "01", "b": "01"}, barred={(("a", "1"), ("b", "1"))}))
    3
    """
    chance = random.Random(0)
    open_pairs = all_pairs(factors) - barred
    cases = []
    while open_pairs:
        first = min(open_pairs)
        tried = [_grown(dict(first), factors, open_pairs, barred, chance) for _ in range(20)]
        best = max(tried, key=lambda case: len(pairs_of(case) & open_pairs))
        open_pairs -= pairs_of(best)
        cases.append(best)
    return cases


def all_pairs(factors: Mapping[str, Sequence[str]]) -> set[Pair]:
    return {
        ((a, x), (b, y))
        for a, b in itertools.combinations(sorted(factors), 2)
        for x, y in itertools.product(factors[a], factors[b])
    }


def pairs_of(case: Case) -> set[Pair]:
    return set(itertools.combinations(sorted(case.items()), 2))


def _grown(
    case: Case,
    factors: Mapping[str, Sequence[str]],
    wanted: set[Pair],
    barred: AbstractSet[Pair],
    chance: random.Random,
) -> Case:
    rest = [name for name in factors if name not in case]
    chance.shuffle(rest)
    for name in rest:
        values = [x for x in factors[name] if not pairs_of({**case, name: x}) & barred]
        chance.shuffle(values)
        case[name] = max(values, key=lambda value: len(pairs_of({**case, name: value}) & wanted))
    return {name: case[name] for name in factors}
