"""What a handoff brings of the windows warms as the windows themselves do."""

from __future__ import annotations

import numpy as np
import pytest

from ess.door import Offload
from ess.errors import BadInput, BadState
from ess.flashtrans.lanes import InlineLane
from ess.pool.warmup import last_windows
from ess.transfer.windows import packed_windows, unpacked_windows
from tests.handoff.layout import LAYOUT

ROWS = 200


def opened(*, mtp_rows: int = ROWS) -> tuple[Offload, object]:
    offload = Offload.create(
        LAYOUT,
        slot_bytes=3 * LAYOUT.chunk_bytes,
        host_bytes=8 * LAYOUT.host_page_bytes,
        sequence_max=2,
        length_max=256,
        lane=InlineLane(),
        poison=True,
    )
    sequence = offload.open(list(range(ROWS + 1)))
    for layer in range(LAYOUT.layer_total):
        rows = np.random.default_rng(layer).integers(0, 255, (ROWS, 16), np.uint8)
        there = ROWS if layer < LAYOUT.layer_count else mtp_rows
        sequence.import_rows(layer, 0, rows[:there])
    return offload, sequence


def residency(offload: Offload) -> list[bytes]:
    offload.drain()
    offload.check()
    sparse = offload._pools.sparse
    ages = sparse.step - sparse._last_use
    arrays = (sparse.slot_of, sparse._row_of, ages, sparse.slots_of(0))
    return [array.tobytes() for array in arrays]


@pytest.mark.parametrize("count", [0, 1, 7, 32])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_slots_and_ages_as_from_the_windows(count: int, seed: int) -> None:
    """More positions are selected than there are slots, so the newest windows must win in both."""
    windows = np.random.default_rng(seed).integers(-1, ROWS, (3, count, 8), np.int32)
    (first, whole), (second, compact) = opened(), opened()
    with first, second:
        cold = residency(first)
        whole.warm(windows)
        raw = packed_windows(windows, ROWS)
        compact.warm_from(*unpacked_windows(raw, group_count=3, length=ROWS))
        assert residency(first) == residency(second)
        assert (residency(first) == cold) is (count == 0)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("sets", "count", "sentence"),
    [
        ([(ints(1), ints(0))] * 2, 1, "sets has 2 entries, must have 3"),
        ([(ints(1), ints(0))] * 3, 33, r"window_count is 33, must be 0\.\.32"),
        ([(ints(1), ints(1))] * 3, 1, r"last windows are 1\.\.1, must be 0\.\.0"),
        ([(ints(1), ints(-1))] * 3, 1, r"last windows are -1\.\.-1"),
        ([(ints(1, 1), ints(0, 0))] * 3, 1, r"ascending and within 0\.\.199"),
        ([(ints(5, ROWS), ints(0, 0))] * 3, 1, "ascending and within"),
        ([(ints(-1, 5), ints(0, 0))] * 3, 1, "ascending and within"),
        ([(ints(1, 2), ints(0))] * 3, 1, "last windows has shape"),
        ([(np.array([1]), ints(0))] * 3, 1, "positions is int64, must be int32"),
    ],
)
def test_sets_that_are_none_change_nothing(sets: list, count: int, sentence: str) -> None:
    offload, sequence = opened()
    with offload:
        before = residency(offload)
        with pytest.raises(BadInput, match=sentence):
            sequence.warm_from(sets, count)
        assert residency(offload) == before


def test_a_preempted_sequence_is_not_warmed() -> None:
    offload, sequence = opened()
    with offload:
        sequence.preempt()
        sets = [last_windows(np.zeros((1, 1), np.int32))] * 3
        with pytest.raises(BadState, match="preempted, not active"):
            sequence.warm_from(sets, 1)


def test_windows_of_which_the_last_group_lacks_rows_warm_no_group() -> None:
    offload, sequence = opened(mtp_rows=10)
    with offload:
        before = residency(offload)
        sets = [last_windows(np.array([[3, 12]], np.int32))] * 3
        with pytest.raises(BadState, match="1 of 2 selected rows were never written"):
            sequence.warm_from(sets, 1)
        assert residency(offload) == before
