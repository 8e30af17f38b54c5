"""Slots per layer: exhaustive search on convex curves, limits, and the digitised profile."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ess.bench.locality import budgets
from ess.errors import BadInput
from ess.pool.budget import _hull, divide, live_curve


def convex_curve(rng: np.random.Generator, size: int) -> np.ndarray:
    falls = np.sort(rng.exponential(10, size - 1))[::-1]
    return 1000 - np.concatenate([[0], np.cumsum(falls)])


def total(curves: list[np.ndarray], slots: tuple[int, ...]) -> float:
    return sum(float(curve[count]) for curve, count in zip(curves, slots, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_no_division_of_convex_curves_is_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    curves = [convex_curve(rng, 9) for _ in range(3)]
    division = divide(curves, total_slots=12, slots_min=1, block=1)
    assert sum(division) == 12
    assert min(division) >= 1
    best = min(
        total(curves, slots)
        for slots in itertools.product(range(1, 9), repeat=3)
        if sum(slots) <= 12
    )
    assert total(curves, division) == pytest.approx(best)


def test_a_cliff_is_taken_whole_or_not_at_all() -> None:
    cliff = np.array([100.0] * 5 + [0.0] * 4)
    slope = 60.0 - 10 * np.arange(9)
    assert divide([cliff, slope], total_slots=6, slots_min=0, block=1) == (5, 1)
    assert divide([cliff, slope], total_slots=5, slots_min=0, block=1) == (5, 0)


def test_blocks_minimum_and_leftovers() -> None:
    flat, falling = np.full(1000, 7.0), 1000.0 - np.arange(1000)
    assert divide([flat, flat], total_slots=300, slots_min=65) == (128, 128)
    assert divide([flat, falling], total_slots=700, slots_min=64) == (64, 576)
    assert divide([falling[:129]], total_slots=10_000, slots_min=64) == (128,), "no use for more"
    assert divide([flat], total_slots=10_000, slots_min=64) == (64,), "nothing saved, nothing given"
    with pytest.raises(BadInput, match="need 256 slots, there are 255"):
        divide([flat, flat], total_slots=255, slots_min=128)


def test_the_digitised_curves_pass_through_their_points() -> None:
    for bent in (False, True):
        curve = budgets.digitised_curve(17, bent=bent)
        assert curve[round(0.2 * budgets.CONTEXT)] == pytest.approx(605, rel=1e-3)
        assert curve[round(0.3 * budgets.CONTEXT)] == pytest.approx(349, rel=1e-3)
    curves = [budgets.digitised_curve(layer, bent=True) for layer in range(61)]
    at_01 = np.mean([curve[round(0.1 * budgets.CONTEXT)] for curve in curves])
    assert at_01 == pytest.approx(640, rel=0.03)


def test_the_two_point_law_saves_a_fifth_of_the_misses() -> None:
    curves = [budgets.digitised_curve(layer, bent=False) for layer in range(61)]
    slots = divide(curves, total_slots=61 * budgets.SLOTS, slots_min=budgets.TOP_K)
    assert sum(slots) <= 61 * budgets.SLOTS
    uniform = (budgets.SLOTS,) * 61
    assert total(curves, slots) <= 0.8 * total(curves, uniform)


@pytest.mark.parametrize(
    ("misses", "corners"),
    [
        ([9.0], [0]),
        ([9.0, 5, 2, 0], [0, 1, 2, 3]),
        ([9.0, 6, 3, 0], [0, 3]),
        ([9.0, 9, 9, 0], [0, 3]),
        ([9.0, 3, 8, 0, 1], [0, 1, 3, 4]),
        ([30.0, 22, 19, 10, 8, 0], [0, 1, 3, 5]),
        ([20.0, 16, 13, 5, 3.5, 2.9, 2.4], [0, 3, 4, 5, 6]),
        ([200.0, 180, 164, 152, 144, 140, 139, 0], [0, 7]),
    ],
)
def test_the_corners_of_a_lower_hull(misses: list[float], corners: list[int]) -> None:
    assert _hull(np.array(misses)) == corners


@pytest.mark.parametrize("seed", range(40))
def test_no_point_lies_below_its_hull(seed: int) -> None:
    misses = np.random.default_rng(seed).integers(0, 50, 12).astype(float)
    corners = _hull(misses)
    below = np.interp(np.arange(12), corners, misses[corners])
    assert (misses >= below - 1e-9).all()
    slopes = np.diff(misses[corners]) / np.diff(corners)
    assert (np.diff(slopes) > 0).all(), "a corner on the line between two others"


def test_a_live_curve_between_ages() -> None:
    """Hits 4 and 2 over 64 rows each: half of an age's rows keep half of its hits."""
    hits, rows = np.array([4.0, 2.0]), np.array([64, 64])
    curve = live_curve(hits=hits, rows=rows, misses=0.5, slots=128, chunk=32, chunk_count=6)
    assert curve[:5].tolist() == [6.5, 4.5, 2.5, 1.5, 0.5]
    slope = 1 / 32 / 0.5
    assert curve[5:].tolist() == pytest.approx([0.5 * np.exp(-slope * n) for n in (32, 64)])
