"""Used slots, and rows that have left them, through every change: with groups that have a window
and groups that have none."""

from __future__ import annotations

import numpy as np

from ess.layout import ModelLayout, RowCodec
from ess.pool.slot_counts import SlotCounts

LAYOUT = ModelLayout(
    name="t",
    layer_count=3,
    groups=((0,), (1,), (2,)),
    row=RowCodec(form="opaque", opaque_bytes=8),
    index=None,
    top_k=8,
    windows=(0, 8, 0),
)


def counts(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def seen(made: SlotCounts) -> tuple[list[int], int, int]:
    return made.used.tolist(), made.departed_count, made.window_departed_count


def test_every_change_is_counted_where_it_belongs():
    made = SlotCounts(LAYOUT, counts(64, 65, 66))
    assert made.total.tolist() == [64, 65, 66]
    assert seen(made) == ([0, 0, 0], 0, 0)
    made.took(range(1, 3), counts(20, 30), counts(0, 0))
    assert seen(made) == ([0, 20, 30], 0, 0), "nothing gave way"
    made.took(range(3), counts(5, 6, 7), counts(0, 2, 3))
    assert seen(made) == ([5, 24, 34], 3, 2)
    made.planned(0, 9, 4)
    assert seen(made) == ([10, 24, 34], 7, 2)
    made.planned(1, 3, 1)
    assert seen(made) == ([10, 26, 34], 7, 3)
    made.left([0, 1, 2], [10, 6, 4], departed=False)
    assert seen(made) == ([0, 20, 30], 7, 3), "they were never part of a length"
    made.left([2, 1], [30, 5], departed=True)
    assert seen(made) == ([0, 15, 0], 37, 8)


def test_a_chunk_that_moves_is_a_departure_even_if_it_is_empty():
    made = SlotCounts(LAYOUT, counts(64, 64, 64))
    fresh = counts(0, 128, 64)
    made.moved(fresh)
    assert made.total is fresh
    assert seen(made) == ([0, 0, 0], 1, 0)
