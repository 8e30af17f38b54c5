"""The measured sizes in words, for refusals."""

from __future__ import annotations

from collections.abc import Iterable

from ess.units import listed

Named = float | str


def choices(pairs: Iterable[tuple[Named, ...]]) -> list[tuple[str, str]]:
    """Joins first halves that have the same second halves.

    >>> choices([(2, 8), (1, 8), (4, 8), (4, 16)])
    [('1 or 2', '8'), ('4', '8 or 16')]
    """
    seconds: dict[Named, list[Named]] = {}
    for first, second in sorted(set(pairs)):
        seconds.setdefault(first, []).append(second)
    firsts: dict[tuple[Named, ...], list[Named]] = {}
    for first, others in seconds.items():
        firsts.setdefault(tuple(others), []).append(first)
    return [(listed(alike), listed(others)) for others, alike in firsts.items()]
