from __future__ import annotations

import numpy as np

from ess.pool.warmup import last_windows, warm_set


def test_each_position_keeps_the_number_of_its_last_window():
    windows = np.array([[1, 2, 3], [2, 9, -1], [3, -1, -1]], np.int32)
    positions, last = last_windows(windows)
    assert dict(zip(positions.tolist(), last.tolist(), strict=True)) == {1: 0, 2: 1, 9: 1, 3: 2}


def test_the_set_is_newest_first_then_by_position():
    chosen = warm_set(np.array([1, 2, 3, 9], np.int32), np.array([0, 1, 2, 1], np.int32), 3)
    assert chosen.positions.tolist() == [3, 2, 9, 1]
    assert chosen.ages.tolist() == [1, 2, 2, 3]


def test_replaying_windows_one_by_one_gives_the_same_order():
    random = np.random.default_rng(5)
    windows = np.stack([np.sort(random.choice(50, 8, replace=False)) for _ in range(10)])
    order: list[int] = []
    for window in windows.tolist():
        order = [p for p in order if p not in window]
        order = window + order
    chosen = warm_set(*last_windows(windows.astype(np.int32)), 10)
    by_age = sorted(zip(chosen.ages.tolist(), chosen.positions.tolist(), strict=True))
    assert [p for _, p in by_age] == chosen.positions.tolist()
    assert set(order) == set(chosen.positions.tolist())
    assert order == chosen.positions.tolist()


def test_no_windows_warm_nothing():
    positions, last = last_windows(np.empty((0, 4), np.int32))
    assert len(warm_set(positions, last, 0).positions) == 0
