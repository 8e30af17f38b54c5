"""How far figures may be off, and which of their sources were not measured for this question.

A band is two shares of a figure: (-0.1, 0.2) is from a tenth less to a fifth more. Errors of
different origin are added as squares; so are those of the two sides of a comparison, which makes
its band wider than it must be, as both sides share their operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

from ess.sim.locality.misses import PUBLISHED_QUERIES, MissCurves
from ess.sim.planning.ask import Ask
from ess.units import counted

Band = tuple[float, float]

EXACT: Final[Band] = (0.0, 0.0)
MISSES_OF: Final = "deepseek-v3.2"


def joined(bands: Iterable[Band]) -> Band:
    """The band of a product whose factors have these bands.

    >>> joined([(-0.3, 0.1), (-0.4, 0.0)])
    (-0.5, 0.1)
    """
    every = list(bands)
    low, high = (math.sqrt(math.fsum(band[side] ** 2 for band in every)) for side in (0, 1))
    return max(-low, -0.99), high


def inverse(band: Band) -> Band:
    """The band of a rate whose time has this band.

    >>> inverse((-0.5, 1.0))
    (-0.5, 1.0)
    """
    low, high = band
    return 1 / (1 + high) - 1, 1 / (1 + low) - 1


def moved(figure: Callable[..., float], **bands: Band) -> Band:
    """The band of `figure`, a function of the factors by which its inputs may be off, each with its
    band: each moves the figure alone, and the moves are added as squares.

    >>> moved(lambda time, rate: rate / time, time=(-0.5, 1.0), rate=(0.0, 0.0))
    (-0.5, 1.0)
    """
    right = dict.fromkeys(bands, 1.0)
    exact = figure(**right)
    if not exact:
        return EXACT
    moves = []
    for name, band in bands.items():
        ends = [figure(**right | {name: 1.0 + side}) / exact - 1.0 for side in band]
        moves.append((min(0.0, *ends), max(0.0, *ends)))
    return joined(moves)


def at_ends(figure: float, band: Band) -> tuple[float, float]:
    return figure * (1.0 + band[0]), figure * (1.0 + band[1])


def miss_marks(curves: MissCurves, ask: Ask, *, slots_each: int, model: str) -> list[str]:
    """Marks where misses are not on the published curves."""
    published = sorted(curves.means)
    marks = []
    if model != MISSES_OF:
        marks.append(f"misses of {model}: those published for {MISSES_OF} stand in")
    if not published[0] <= ask.context <= published[-1]:
        marks.append(
            f"misses at {ask.context:,} tokens: published for contexts of {published[0]:,} to "
            f"{published[-1]:,}"
        )
    elif slots_each < min(curves.means[published[0]].sizes[0], 1.0) * ask.context:
        marks.append(
            "misses with so few slots for the context: those of a shorter context stand in"
        )
    if ask.queries_each != PUBLISHED_QUERIES:
        marks.append(
            f"misses of {counted(ask.queries_each, 'token')} a step: those published for "
            f"{PUBLISHED_QUERIES} stand in"
        )
    return marks
