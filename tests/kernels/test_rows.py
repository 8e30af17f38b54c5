"""Row movers against the obvious loop: every size, instruction set, list and stride."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ess.errors import BadInput, Unavailable
from ess.flashtrans import copy_rows, gather_rows, scatter_rows
from ess.flashtrans.rows import STREAM_ABOVE_BYTES, check_row_numbers, run, run_numpy
from ess.flashtrans.views import CheckedCopy, check
from ess.flashtrans.ways import way_names
from ess.kernels.cpu import native
from ess.kernels.streams import RowCopy
from tests.support.built import needs_native

ROW_BYTES = (4, 68, 196, 264, 528, 584, 656, 1152, 2304)
WAYS = range(len(way_names()) if native.available() else 1)
RUN_LENGTHS = (1, 1, 1, 2, 5, 30, 70)
GAPS = ((0, 0), (0, 48), (0, 7), (12, 4), (640, 0), (5, 3))

Bytes = npt.NDArray[np.uint8]


def matrix(rng: np.random.Generator, rows: int, row_bytes: int, gap: int, start: int) -> Bytes:
    """Random rows `gap` bytes apart that begin `start` bytes into their array."""
    stride = row_bytes + gap
    whole = rng.integers(0, 256, start + rows * stride + 64, dtype=np.uint8)
    return whole[start : start + rows * stride].reshape(rows, stride)[:, :row_bytes]


def whole_of(view: Bytes) -> Bytes:
    base = view
    while isinstance(base.base, np.ndarray):
        base = base.base
    return base


def distinct_rows(rng: np.random.Generator, count: int, limit: int, dtype: Any) -> Any:
    """Runs of neighbours in random order, each row once, some replaced by -1."""
    runs, at = [], 0
    while at < limit:
        length = int(rng.choice(RUN_LENGTHS))
        runs.append(np.arange(at, min(at + length, limit)))
        at += length
    rng.shuffle(runs)
    rows = np.concatenate(runs)[:count].astype(dtype)
    rows[rng.random(count) < 0.1] = -1
    return rows


def obvious(copy: RowCopy) -> None:
    count = len(copy.source if copy.source_rows is None else copy.source_rows)
    for i in range(count):
        source_row = i if copy.source_rows is None else int(copy.source_rows[i])
        target_row = i if copy.target_rows is None else int(copy.target_rows[i])
        if source_row >= 0 and target_row >= 0:
            copy.target[target_row] = copy.source[source_row]


def case(
    seed: int, row_bytes: int, dtype: Any, lists: str, gap: int, start: int, count: int
) -> RowCopy:
    rng = np.random.default_rng(seed)
    limit = count + 90
    source_rows = distinct_rows(rng, count, limit, dtype) if "s" in lists else None
    target_rows = distinct_rows(rng, count, limit, dtype) if "t" in lists else None
    if source_rows is not None and target_rows is not None:
        target_rows[: count // 2] = source_rows[: count // 2]
        target_rows = first_of_each(target_rows)
    source = matrix(rng, limit if "s" in lists else count, row_bytes, gap, start)
    target = matrix(rng, limit if "t" in lists else count, row_bytes, gap, start // 2)
    return RowCopy(source=source, source_rows=source_rows, target=target, target_rows=target_rows)


def first_of_each(rows: Any) -> Any:
    seen = np.zeros(len(rows), np.bool_)
    seen[np.unique(rows, return_index=True)[1]] = True
    return np.where(seen, rows, np.asarray(-1, rows.dtype))


def expected_bytes(copy: RowCopy) -> Bytes:
    """The whole target array, surroundings included, after the obvious loop."""
    whole = whole_of(copy.target)
    before = whole.copy()
    obvious(copy)
    after = whole.copy()
    whole[:] = before
    return after


@pytest.mark.parametrize("row_bytes", ROW_BYTES)
def test_matrix(row_bytes: int) -> None:
    asked = os.environ.get("ESS_ISA")
    assert asked in (None, native.isa() if native.available() else None)
    shapes = [(gap, start, 331) for gap, start in GAPS] + [(0, 0, count) for count in (0, 1, 7)]
    for seed, (dtype, lists, (gap, start, count)) in enumerate(
        itertools.product((np.int32, np.int64), ("", "s", "t", "st"), shapes)
    ):
        copy = case(seed, row_bytes, dtype, lists, gap, start, count)
        want = expected_bytes(copy)
        before = whole_of(copy.target).copy()
        for way, stream_above in [(0, 0), *((way, STREAM_ABOVE_BYTES) for way in WAYS)]:
            whole_of(copy.target)[:] = before
            run(check(copy), stream_above=stream_above, way=way)
            context = (row_bytes, dtype, lists, gap, start, count, way, stream_above)
            assert np.array_equal(whole_of(copy.target), want), context


def test_matrix_at_the_edge_of_the_world() -> None:
    """The page behind the last row may not be touched: a read or write there ends the process."""
    page = mmap.PAGESIZE
    region = mmap.mmap(-1, 4 * page, flags=mmap.MAP_PRIVATE)
    whole = np.frombuffer(region, np.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    behind = whole.__array_interface__["data"][0] + 3 * page
    assert protect(behind, page, 0) == 0
    for row_bytes in ROW_BYTES:
        edge = whole[: 3 * page][-2 * row_bytes :].reshape(2, row_bytes)
        inside = np.arange(2 * row_bytes).astype(np.uint8).reshape(2, row_bytes)
        for rows in (None, np.array([1, 0])):
            copy_rows(source=inside, target=edge, target_rows=rows)
            back = np.zeros_like(inside)
            copy_rows(source=edge, source_rows=rows, target=back)
            assert np.array_equal(back, inside)


def test_a_skip_is_no_neighbour_of_row_0() -> None:
    """-1, 0, 1, ... counts up like a run of neighbours, long enough to be copied as one."""
    rows = np.arange(-1, 60)
    source = np.full((60, 656), 7, np.uint8)
    gathered, scattered = np.zeros((61, 656), np.uint8), np.zeros((60, 656), np.uint8)
    gather_rows(source=source, source_rows=rows, target=gathered)
    assert (gathered[1:] == 7).all()
    assert (gathered[0] == 0).all()
    scatter_rows(source=gathered, target=scattered, target_rows=rows)
    assert (scattered == 7).all()


@pytest.mark.parametrize("lists", ["", "s", "t", "st"])
def test_numpy_fallback_agrees(lists: str) -> None:
    copy = case(5, 656, np.int64, lists, 12, 4, 100)
    want = expected_bytes(copy)
    check_row_numbers(check(copy))
    run_numpy(check(copy))
    assert np.array_equal(whole_of(copy.target), want)


@needs_native
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_the_rows(threads: int) -> None:
    copy = case(7, 656, np.int64, "st", 0, 0, 4001)
    want = expected_bytes(copy)
    for _ in range(20):
        whole_of(copy.target)[:] = 0
        want_now = np.where(written(copy), want, 0)
        run(check(copy), threads=threads)
        assert np.array_equal(whole_of(copy.target), want_now)


@needs_native
@pytest.mark.parametrize("way", WAYS)
def test_threads_share_the_rows_of_a_gather(way: int) -> None:
    """Pieces end in the middle of lines that the next piece writes too."""
    copy = case(8, 584, np.int64, "s", 0, 3, 4001)
    want = expected_bytes(copy)
    before = whole_of(copy.target).copy()
    for _ in range(10):
        whole_of(copy.target)[:] = before
        run(check(copy), threads=3, way=way)
        assert np.array_equal(whole_of(copy.target), want)


def written(copy: RowCopy) -> npt.NDArray[np.bool_]:
    marks = np.zeros(copy.target.shape, np.uint8)
    kept = (copy.source_rows >= 0) & (copy.target_rows >= 0)
    marks[copy.target_rows[kept]] = 1
    flat = np.zeros(whole_of(copy.target).size, np.bool_)
    flat[: marks.size] = marks.reshape(-1) == 1
    return flat


@needs_native
def test_many_callers_share_the_helpers() -> None:
    wrong: list[int] = []

    def caller(seed: int) -> None:
        copy = case(seed, 656, np.int32, "s", 0, 0, 3000)
        want = expected_bytes(copy)
        for _ in range(10):
            run(check(copy), threads=3)
            if not np.array_equal(whole_of(copy.target), want):
                wrong.append(seed)

    callers = [threading.Thread(target=caller, args=(seed,)) for seed in range(4)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert wrong == []


def test_rows_past_four_gibibytes() -> None:
    """Addresses beyond 32 bits, in an array that is almost all untouched."""
    row_bytes, rows = 2304, 2_000_000
    source = np.zeros((rows, row_bytes), np.uint8)
    last = np.array([rows - 1, 1_864_136, 0], np.int32)
    source[last] = np.arange(1, 4, dtype=np.uint8)[:, None]
    target = np.zeros((3, row_bytes), np.uint8)
    gather_rows(source=source, source_rows=last, target=target)
    assert target[:, 0].tolist() == [1, 2, 3]
    assert (target == target[:, :1]).all()
    scatter_rows(source=target, target=source, target_rows=last - 0)
    assert source[rows - 1, -1] == 1


def test_torch_tensors_are_copied_like_arrays() -> None:
    torch = pytest.importorskip("torch")
    source = torch.arange(40 * 164, dtype=torch.float32).reshape(40, 164)
    rows = torch.tensor([3, -1, 39, 0], dtype=torch.int32)
    target = torch.full((4, 200), -1.0)
    gather_rows(source=source, source_rows=rows, target=target[:, 10:174])
    assert torch.equal(target[[0, 2, 3], 10:174], source[[3, 39, 0]])
    assert (target[1] == -1).all()
    assert (target[:, :10] == -1).all()
    assert (target[:, 174:] == -1).all()
    back = np.zeros((40, 164), np.float32)
    scatter_rows(source=target[:, 10:174], target=back, target_rows=rows.long())
    assert np.array_equal(back[[3, 39, 0]], source[[3, 39, 0]].numpy())


@pytest.mark.parametrize("dtype", ["bfloat16", "int16", "bool"])
def test_torch_lists_of_the_wrong_type(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    target = np.zeros((8, 656), np.uint8)
    with pytest.raises(BadInput, match=f"source_rows is torch.{dtype}"):
        gather_rows(
            source=ROWS, source_rows=torch.zeros(8, dtype=getattr(torch, dtype)), target=target
        )
    with pytest.raises(BadInput, match="not a contiguous list"):
        gather_rows(source=ROWS, source_rows=torch.arange(16)[::2], target=target)


def test_torch_on_another_device() -> None:
    torch = pytest.importorskip("torch")
    rows = torch.empty(4, 164, device="meta")
    with pytest.raises(Unavailable, match="meta"):
        gather_rows(source=rows, source_rows=None, target=np.zeros((4, 656), np.uint8))


ROWS = np.zeros((8, 656), np.uint8)
LIST = np.arange(8)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"source": ROWS[0]}, "source has 1 dimensions"),
        ({"source": [[1]]}, "source is list"),
        ({"source": ROWS[:, :654]}, "source has rows of 654 bytes"),
        ({"source": ROWS[:, :0]}, "source has rows of 0 bytes"),
        ({"source": ROWS[:, ::2]}, "source steps 2 bytes within a row"),
        ({"source": ROWS[::-1]}, "source steps -656 bytes"),
        ({"source": np.broadcast_to(ROWS[:1], (8, 656))}, "source steps 0 bytes"),
        ({"source": ROWS[:, :652]}, "source rows have 652 bytes, target 656"),
        ({"source_rows": LIST[:7]}, "7 source rows cannot fill 8"),
        ({"source_rows": LIST.astype(np.int16)}, "source_rows is int16"),
        ({"source_rows": LIST.astype(np.uint64)}, "source_rows is uint64"),
        ({"source_rows": LIST.astype(">i8")}, "source_rows is >i8"),
        ({"source_rows": LIST.astype(np.float32)}, "source_rows is float32"),
        ({"source_rows": LIST.tolist()}, "source_rows is list"),
        ({"source_rows": np.arange(16)[::2]}, "source_rows of shape"),
        ({"source_rows": LIST[None]}, "source_rows of shape"),
        ({"source_rows": LIST + 1}, r"source_rows\[7\] is 8, outside -1..7 of source"),
        ({"source_rows": LIST - 2}, r"source_rows\[0\] is -2"),
        ({"source_rows": (LIST + 1).astype(np.int32)}, r"source_rows\[7\] is 8"),
        ({"source_rows": LIST + (1 << 62)}, r"source_rows\[0\] is 4611686018427387904"),
        ({"source_rows": LIST + (2**63 - 8)}, r"source_rows\[0\] is 9223372036854775800"),
        ({"target_rows": LIST[::-1] * 2}, r"target_rows\[0\] is 14, outside -1..7 of target"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_bad_input_changes_nothing(change: dict[str, Any], sentence: str) -> None:
    target = np.full((8, 656), 7, np.uint8)
    good: dict[str, Any] = {"source": ROWS, "source_rows": LIST, "target": target}
    with pytest.raises(BadInput, match=sentence):
        copy_rows(**{**good, **change})
    assert (target == 7).all()


def test_a_read_only_target_is_refused() -> None:
    target = np.zeros((8, 656), np.uint8)
    target.flags.writeable = False
    with pytest.raises(BadInput, match="read-only"):
        gather_rows(source=ROWS, source_rows=None, target=target)


def test_both_ways_find_the_same_fault() -> None:
    copy = RowCopy(source=ROWS, source_rows=LIST + 3, target=ROWS.copy())
    with pytest.raises(BadInput) as plain:
        check_row_numbers(check(copy))
    with pytest.raises(BadInput) as called:
        run(check(copy))
    assert str(plain.value) == str(called.value)


@needs_native
def test_the_gil_is_free_while_rows_move() -> None:
    """With a switch interval of an hour another thread runs only if the call lets go."""
    copy = check(case(3, 656, np.int64, "s", 0, 0, 20_000))
    assert not another_thread_runs_during(lambda: sum(range(1000)))
    assert another_thread_runs_during(lambda: run(copy))


def another_thread_runs_during(call: Callable[[], object]) -> bool:
    turns, stop, started = [0], threading.Event(), threading.Event()

    def other() -> None:
        while not stop.is_set():
            turns[0] += 1
            started.set()
            time.sleep(0)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=other)
    sys.setswitchinterval(3600)
    try:
        thread.start()
        started.wait()
        before = turns[0]
        for _ in range(1000):
            call()
            if turns[0] > before:
                return True
        return False
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()


def test_a_checked_copy_keeps_its_matrices() -> None:
    source = np.arange(8 * 4, dtype=np.uint8).reshape(8, 4)
    target = np.zeros((8, 4), np.uint8)
    copy: CheckedCopy = check(RowCopy(source=source.copy(), target=target))
    run(copy)
    assert np.array_equal(target, source)
