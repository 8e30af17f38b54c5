"""How many slots each layer group should own: equal marginal benefit over miss curves.

A curve gives misses per step by slots. `live_curve` reads it from the running pool. Batch LRU holds
the rows of the least ages, so an arena cut down to the rows of age a and less would keep the hits
of these ages and lose the others: below its present size a group's curve is known, from two
histograms: the ages that hits had, and the ages that rows have. Hits of an age are spread evenly
over the rows of that age. Above its present size the curve is a guess: it goes on with the slope of
its last chunk and flattens as misses run out; the next measurement corrects it. Two limits follow.
A group whose rows come round later than its arena reaches shows no slope, so it is given nothing.
And a group with a chunk of free slots lacks no room: its misses are first touches, its curve ends
flat.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ess.array_types import Counts
from ess.errors import BadInput
from ess.pool.lru.arena import BLOCK_SLOTS
from ess.units import div_ceil

Curve = npt.NDArray[np.float64]

WIN: Final = 0.05
SWEEPS: Final = 4


def divide(
    curves: Sequence[Curve], *, total_slots: int, slots_min: int, block: int = BLOCK_SLOTS
) -> tuple[int, ...]:
    """Slots per layer, in whole blocks, such that the next block would save as much in every layer.

    Curves are replaced by their lower convex hulls, on which taking the steepest piece anywhere is
    optimal; a curve that is not convex is met wherever a whole piece was taken. Slots that would
    save nothing are left over.
    """
    first = div_ceil(slots_min, block)
    left = total_slots // block - first * len(curves)
    if left < 0:
        raise BadInput(
            f"{len(curves)} layers of at least {slots_min} slots need {first * block * len(curves)}"
            f" slots, there are {total_slots}"
        )
    pieces: list[tuple[float, int, int]] = []
    for layer, curve in enumerate(curves):
        misses = curve[np.arange(first * block, curve.size, block)]
        corners = _hull(misses)
        pieces += [
            ((misses[end] - misses[start]) / (end - start), layer, end - start)
            for start, end in itertools.pairwise(corners)
        ]
    blocks = [first] * len(curves)
    for gain, layer, size in sorted(pieces):
        taken = min(size, left) if gain < 0 else 0
        blocks[layer] += taken
        left -= taken
    assert left >= 0, f"{-left} blocks were given that are not there"
    return tuple(count * block for count in blocks)


def _hull(misses: Curve) -> list[int]:
    """Corners of the lower convex hull of (0, misses[0]), (1, misses[1]), ...

    A point on or above the line between two others is no corner. Most are so between their
    neighbours and go at once; the few that are left are looked at in turn.
    """
    points = np.arange(misses.size)
    for _ in range(SWEEPS):
        at = misses[points]
        left, middle, right = points[:-2], points[1:-1], points[2:]
        stays = (at[1:-1] - at[:-2]) * (right - left) < (at[2:] - at[:-2]) * (middle - left)
        points = np.concatenate([points[:1], middle[stays], points[-1:]])[: points.size]
    corners: list[tuple[int, float]] = []
    for x, y in zip(points.tolist(), misses[points].tolist(), strict=True):
        while len(corners) > 1:
            (x0, y0), (x1, y1) = corners[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            corners.pop()
        corners.append((x, y))
    return [x for x, _ in corners]


def live_curve(
    *,
    hits: Curve,
    rows: Counts,
    misses: float,
    slots: int,
    chunk: int,
    chunk_count: int,
    first: int = 0,
) -> Curve:
    """Misses per step by chunks of `chunk` slots beside `first` slots, up to `chunk_count` of them.

    `hits[age]` per step, `rows[age]` resident now, by the age they will have in the next step.
    """
    assert hits.shape == rows.shape, f"{hits.shape} ages of hits, {rows.shape} of rows"
    used = int(rows.sum())
    assert 0 <= used <= slots, f"{used} rows in {slots} slots"
    sizes = first + np.arange(chunk_count + 1) * chunk
    reach = np.concatenate([[0], np.cumsum(rows)])
    lost = np.maximum(0.0, hits.sum() - np.concatenate([[0], np.cumsum(hits)]))
    curve: Curve = misses + np.interp(sizes, reach, lost)
    grown = sizes > slots
    if misses > 0:
        slope = float(np.interp(slots - chunk, reach, lost)) / chunk
        assert slope >= 0, f"more slots cost {-slope} misses each"
        curve[grown] = misses * np.exp(-slope * (sizes[grown] - slots) / misses)
    return curve


def best_division(
    curves: Sequence[Curve], chunks: Sequence[int], floors: Sequence[int]
) -> tuple[int, ...]:
    """How these chunks would be shared best. A group below its floor needs chunks at any price."""
    assert len(curves) == len(chunks) == len(floors), "one curve, count and floor per group"
    price = 1 + sum(float(curve.max()) for curve in curves)
    priced = [
        curve + price * np.maximum(0, floor - np.arange(curve.size))
        for curve, floor in zip(curves, floors, strict=True)
    ]
    return divide(priced, total_slots=sum(chunks), slots_min=1, block=1)


def next_move(
    curves: Sequence[Curve], chunks: Sequence[int], floors: Sequence[int], wanted: Sequence[int]
) -> tuple[int, int] | None:
    """Source and target of the next chunk on the way to the division `wanted`, if that saves 5 %.
    A group at its floor gives nothing."""
    present, best = _total(curves, chunks), _total(curves, wanted)
    if present - best <= WIN * present:
        return None
    lacking = [want - have for want, have in zip(wanted, chunks, strict=True)]
    surplus = [
        have - max(want, floor) for want, have, floor in zip(wanted, chunks, floors, strict=True)
    ]
    source, target = int(np.argmax(surplus)), int(np.argmax(lacking))
    assert source != target or surplus[source] <= 0 or lacking[target] <= 0, (
        f"group {source} has chunks to spare and lacks them"
    )
    return (source, target) if surplus[source] > 0 and lacking[target] > 0 else None


def _total(curves: Sequence[Curve], chunks: Sequence[int]) -> float:
    return sum(float(curve[count]) for curve, count in zip(curves, chunks, strict=True))
