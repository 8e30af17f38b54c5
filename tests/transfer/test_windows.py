"""Windows in few bytes: what goes in comes out, and nothing else is taken for windows.

`python -m tests.transfer.test_windows` prints sizes and times.
"""

from __future__ import annotations

import random
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ess.errors import BadInput
from ess.pool.warmup import WINDOW_MAX, last_windows, warm_set
from ess.transfer.windows import packed_windows, unpacked_windows, window_bytes_max

HEAD_BYTES = 16


def drawn(
    seed: int, *, groups: int, count: int, k: int, length: int, reuse: float = 0.9
) -> np.ndarray:
    """Selections ascending and -1 padded, most of each one again in the next."""
    rng = np.random.default_rng(seed)
    chosen = min(k, length)
    windows = np.full((groups, count, k), -1, np.int32)
    for group in range(groups):
        held = rng.choice(length, chosen, replace=False)
        for number in range(count):
            fresh = rng.random(chosen) > reuse
            held = np.unique(np.where(fresh, rng.integers(0, length, chosen), held))
            windows[group, number, : len(held)] = held
            held = np.resize(held, chosen)
    return windows


def same(sets: list, windows: np.ndarray) -> None:
    assert len(sets) == len(windows)
    for (positions, last), group in zip(sets, windows, strict=True):
        wanted, wanted_last = last_windows(group)
        assert positions.dtype == last.dtype == np.int32
        assert np.array_equal(positions, wanted)
        assert np.array_equal(last, wanted_last)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    groups=st.integers(1, 4),
    count=st.integers(0, WINDOW_MAX),
    k=st.integers(0, 9),
    length=st.integers(1, 300),
)
def test_windows_come_out_as_they_went_in(
    seed: int, groups: int, count: int, k: int, length: int
) -> None:
    windows = np.random.default_rng(seed).integers(-1, length, (groups, count, k), np.int32)
    raw = packed_windows(windows, length)
    assert len(raw) <= window_bytes_max(groups, length, k) <= window_bytes_max(groups, length)
    for form in (raw, memoryview(bytearray(raw))):
        sets, window_count = unpacked_windows(form, group_count=groups, length=length)
        assert window_count == count
        same(sets, windows)
        for (positions, last), group in zip(sets, windows, strict=True):
            wanted = warm_set(*last_windows(group), count)
            made = warm_set(positions, last, window_count)
            assert np.array_equal(made.positions, wanted.positions)
            assert np.array_equal(made.ages, wanted.ages)


def test_no_windows_are_a_head_alone() -> None:
    raw = packed_windows(np.empty((61, 0, 2048), np.int32), 131_072)
    assert len(raw) == HEAD_BYTES
    sets, window_count = unpacked_windows(raw, group_count=61, length=131_072)
    assert window_count == 0
    assert [len(positions) for positions, _ in sets] == [0] * 61


def test_a_sequence_without_rows_has_windows_that_select_nothing() -> None:
    raw = packed_windows(np.full((2, 3, 4), -1, np.int32), 0)
    assert unpacked_windows(raw, group_count=2, length=0)[1] == 3


@pytest.mark.parametrize(
    ("windows", "length", "sentence"),
    [
        (np.zeros((2, 3), np.int32), 4, r"shape \(2, 3\), not \[groups, 0 to 32, k\]"),
        (np.zeros((2, 33, 1), np.int32), 4, r"shape \(2, 33, 1\)"),
        (np.full((2, 3, 1), 4, np.int32), 4, r"positions 4\.\.4, must be -1\.\.3"),
        (np.full((2, 3, 1), -2, np.int32), 4, r"positions -2\.\.-2"),
        (np.full((2, 3, 1), -1, np.int32), 1 << 31, "over 2147483648 positions"),
    ],
)
def test_windows_that_are_none_are_not_packed(
    windows: np.ndarray, length: int, sentence: str
) -> None:
    with pytest.raises(BadInput, match=sentence):
        packed_windows(windows, length)


def opens(raw: bytes, *, group_count: int, length: int) -> bool:
    """True when they are windows; anything but BadInput goes through."""
    try:
        sets, window_count = unpacked_windows(raw, group_count=group_count, length=length)
    except BadInput:
        return False
    for positions, last in sets:
        assert len(positions) == len(last)
        assert (np.diff(positions) > 0).all()
        assert not len(positions) or 0 <= positions[0] <= positions[-1] < length
        assert not len(last) or 0 <= last.min() <= last.max() < window_count
    return True


@pytest.mark.parametrize("seed", range(20))
def test_damaged_windows_are_bad_input_or_other_windows(seed: int) -> None:
    chance = random.Random(seed)
    groups, length = chance.randint(1, 5), chance.randint(1, 400)
    raw = packed_windows(drawn(seed, groups=groups, count=4, k=8, length=length), length)
    assert opens(raw, group_count=groups, length=length)
    for cut in {chance.randrange(len(raw)) for _ in range(50)}:
        assert not opens(raw[:cut], group_count=groups, length=length)
    assert not opens(raw + b"\0", group_count=groups, length=length)
    assert not opens(raw, group_count=groups + 1, length=length)
    assert not opens(raw, group_count=groups, length=length + 1)
    for _ in range(200):
        flipped = bytearray(raw)
        flipped[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        opens(bytes(flipped), group_count=groups, length=length)
        noise = chance.randbytes(chance.randrange(len(raw) + 40))
        opens(noise, group_count=groups, length=length)
        opens(raw[:HEAD_BYTES] + noise, group_count=groups, length=length)


def test_a_flip_in_head_or_bitmaps_never_passes() -> None:
    groups, length = 3, 77
    raw = packed_windows(drawn(1, groups=groups, count=4, k=8, length=length), length)
    bitmaps_end = HEAD_BYTES + groups * 10
    for bit in range(8 * bitmaps_end):
        if 32 <= bit < 64:
            continue  # other windows than were, should none of a higher number be named
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not opens(bytes(flipped), group_count=groups, length=length), f"bit {bit}"


def test_a_bitmap_of_ones_costs_no_memory_that_did_not_come() -> None:
    """61 groups that select every position, without a byte for one of them."""
    groups, length = 61, 131_072
    raw = packed_windows(np.zeros((groups, 1, 1), np.int32), length)
    ones = raw[:HEAD_BYTES] + b"\xff" * (len(raw) - HEAD_BYTES - groups) + bytes(groups)
    tracemalloc.start()
    assert not opens(ones, group_count=groups, length=length)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * length, f"{peak} bytes were needed to refuse {len(ones)}"


def report() -> None:
    for reuse in (0.95, 0.8, 0.0):
        windows = drawn(0, groups=61, count=32, k=2048, length=131_071, reuse=reuse)
        begun = time.perf_counter()
        raw = packed_windows(windows, 131_071)
        packed = time.perf_counter()
        unpacked_windows(raw, group_count=61, length=131_071)
        done = time.perf_counter()
        times = f"packed in {1e3 * (packed - begun):.0f} ms, unpacked {1e3 * (done - packed):.0f}"
        print(f"{reuse:.0%} selected again: {windows.nbytes:,} -> {len(raw):,} bytes, {times}")


if __name__ == "__main__":
    report()
