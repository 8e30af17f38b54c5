"""The kernels that move rows, on an emulated device, against NumPy; byte for byte."""

from __future__ import annotations

import ctypes
import math
from itertools import pairwise

import numpy as np
import pytest

from ess.errors import BadInput
from ess.kernels.cuda import rows
from ess.kernels.cuda.rows import MoveForm
from ess.pool.cuda_programs import rival_form
from tests.support.emulate import emulated, lent, needs_compiler, source_of
from tests.support.few import few

pytestmark = needs_compiler

ROW_SIZES = (264, 528, 584, 656, 1152, 2304)


def address(array):
    return 0 if array is None else array.__array_interface__["data"][0]


def aligned(shape, offset=0):
    memory = np.empty(int(np.prod(shape)) + 64 + offset, np.uint8)
    start = -address(memory) % 64 + offset
    return memory[start : start + int(np.prod(shape))].reshape(shape)


class Case:
    """A source and a target wider than their rows, and lists with skipped pairs."""

    def __init__(self, row_bytes, pair_count, *, seed=0, gap=16, offset=0):
        self.random = np.random.default_rng(seed)
        self.row_bytes, self.pair_count = row_bytes, pair_count
        self.source = aligned((pair_count + 9, row_bytes + gap), offset)
        self.target = aligned((pair_count + 5, row_bytes + 2 * gap), offset)
        self.source[:] = self.random.integers(0, 256, self.source.shape)
        self.target[:] = 0xEE
        self.source_rows = self.random.integers(0, len(self.source), pair_count).astype(np.int32)
        self.target_rows = self.random.permutation(len(self.target))[:pair_count].astype(np.int32)
        for rows_of in (self.source_rows, self.target_rows):
            rows_of[self.random.random(pair_count) < 0.1] = -1

    def expected(self, count):
        target = self.target.copy()
        pairs = zip(self.source_rows[:count], self.target_rows[:count], strict=True)
        for source, target_row in pairs:
            if source >= 0 and target_row >= 0:
                target[target_row, : self.row_bytes] = self.source[source, : self.row_bytes]
        return target

    def numbers(self):
        sides = self.source, self.target
        return [number for side in sides for number in (side.strides[0], address(side))]

    def arrays(self):
        names = ("source", "source_rows", "target", "target_rows", "count")
        return {name: getattr(self, name) for name in names}

    def record(self, count=None):
        self.count = None if count is None else np.array([count], np.int32)
        return rows.move_record(
            source=address(self.source),
            source_rows=address(self.source_rows),
            source_stride=self.source.strides[0],
            target=address(self.target),
            target_rows=address(self.target_rows),
            target_stride=self.target.strides[0],
            pair_count=self.pair_count,
            count=address(self.count),
        )


def run(form: MoveForm, case, record, folder, *, blocks=2, threads=None, seed=1):
    threads = threads or form.threads
    shared = form.in_flight * threads * (form.row_bytes + 8) if form.way == "ring" else 0
    kernel = emulated(form.program, {form.entry: "Move"}, folder)[form.entry]
    with lent(folder, case.arrays()):
        kernel(record, blocks=blocks, threads=threads, shared_bytes=shared, seed=seed)


def requests_of(form, case, record, folder, lanes):
    """How often `lanes` neighbours ask for a line, in all."""
    kernel = emulated(form.program, {form.entry: "Move"}, folder)[form.entry]
    library = ctypes.CDLL(str(folder / f"{source_of(form.program, {form.entry: 'Move'})[1]}.so"))
    library.emulated_requests.restype = ctypes.c_int64
    library.emulated_count()
    with lent(folder, case.arrays()):
        kernel(record, blocks=2, threads=96)
    return library.emulated_requests(lanes)


def form_of(way, case):
    make = rows.ring_form if way == "ring" else rows.flat_form
    return make(case.row_bytes, *case.numbers())


WAYS = [("flat", 656), ("flat", 584), ("ring", 656)]
SIDES = ("source_rows", "target_rows")
MORE = [("flat", 264), ("flat", 2304), ("ring", 2304)]
"""Narrow units, and rows of whole lines."""
EVERY = [*(("flat", size) for size in ROW_SIZES), *(("ring", size) for size in ROW_SIZES[1:])]
REST = [each for each in EVERY if each not in (*WAYS, *MORE, ("ring", 584))]
CASES = [*WAYS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)]
CASES += few([], all_of=REST)


@pytest.mark.parametrize(("way", "row_bytes"), CASES)
def test_rows_arrive_and_nothing_else_changes(way, row_bytes, folder):
    for seed, (pair_count, blocks, threads) in enumerate(
        [(1, 1, 32), (40, 2, 64), (333, 3, 32), (100, 1, 96), (500, 1, 32), (7, 4, 64), (0, 1, 32)]
    ):
        case = Case(row_bytes, pair_count, seed=seed)
        expected = case.expected(pair_count)
        record = case.record()
        run(form_of(way, case), case, record, folder, blocks=blocks, threads=threads, seed=seed)
        np.testing.assert_array_equal(case.target, expected)


@pytest.mark.parametrize(("way", "row_bytes"), WAYS[::2])
@pytest.mark.parametrize("count", [0, 1, 29, 60, 1000])
def test_the_count_lies_on_the_device(way, row_bytes, count, folder):
    case = Case(row_bytes, 60)
    expected = case.expected(min(count, 60))
    run(form_of(way, case), case, case.record(count), folder, threads=64)
    np.testing.assert_array_equal(case.target, expected)


@pytest.mark.parametrize(("way", "row_bytes"), WAYS[::2])
@pytest.mark.parametrize("left_out", [SIDES, SIDES[:1], SIDES[1:]], ids=["both", *SIDES])
def test_without_lists_rows_keep_their_numbers(way, row_bytes, left_out, folder):
    case = Case(row_bytes, 50)
    for name in left_out:
        setattr(case, name, np.arange(50, dtype=np.int32))
    expected = case.expected(50)
    record = case.record()
    for name in left_out:
        setattr(record, name, None)
    run(form_of(way, case), case, record, folder, threads=32)
    np.testing.assert_array_equal(case.target, expected)


APART = [(656, 0), (584, 0), (264, 8), (656, 16), (528, 0)]


def lines_of(case, count):
    """How many lines the rows of the far side touch, each row for itself."""
    kept = case.source_rows[:count][
        (case.source_rows[:count] >= 0) & (case.target_rows[:count] >= 0)
    ]
    first = address(case.source) + kept * np.int64(case.source.strides[0])
    return int(((first + case.row_bytes - 1) // 128 - first // 128 + 1).sum())


@pytest.mark.parametrize(("row_bytes", "gap"), few(APART[:3], all_of=APART))
def test_a_line_is_asked_for_once(row_bytes, gap, folder):
    """A warp asks for it once, and so do the eight lanes (more with narrow units) that share a
    line."""
    case = Case(row_bytes, 120, gap=gap)
    case.source_rows = 2 * case.random.permutation(60).astype(np.int32)
    case.target_rows, case.pair_count = case.target_rows[:60].copy(), 60
    form, wanted = form_of("flat", case), lines_of(case, 60)
    wide = 128 // form.unit_bytes
    for lanes in (32, wide):
        assert requests_of(form, case, case.record(), folder, lanes) == wanted


def test_a_span_holds_a_row_at_the_worst_place():
    assert rows.flat_form(656).span_bytes == 6 * 128
    assert rows.flat_form(1152).span_bytes == rows.flat_form(1152, 4096).span_bytes == 9 * 128
    assert rows.flat_form(1152, 1168).span_bytes == 10 * 128
    for row_bytes in ROW_SIZES:
        step = math.gcd(128, row_bytes)
        worst = max(at % 128 + row_bytes for at in range(0, 1280, step))
        assert rows.flat_form(row_bytes).span_bytes == -(-worst // 128) * 128


@pytest.mark.parametrize("lines_of_target", [False, True])
def test_lines_of_either_side(lines_of_target, folder):
    case = Case(656, 200, offset=48)
    expected = case.expected(200)
    record = case.record()
    record.lines_of = int(lines_of_target)
    run(form_of("flat", case), case, record, folder, threads=96)
    np.testing.assert_array_equal(case.target, expected)


def test_odd_addresses_take_narrower_units(folder):
    case = Case(656, 30, gap=4)
    form = form_of("flat", case)
    assert form.unit_bytes == 4
    expected = case.expected(30)
    run(form, case, case.record(), folder, threads=64)
    np.testing.assert_array_equal(case.target, expected)
    with pytest.raises(BadInput, match="16"):
        rows.ring_form(656, *case.numbers())


@pytest.mark.parametrize("unit_bytes", [8, 16])
def test_the_rival_of_the_benchmark_moves_the_same(unit_bytes, folder):
    case = Case(656, 70)
    expected = case.expected(70)
    run(rival_form(656, unit_bytes), case, case.record(), folder, threads=64)
    np.testing.assert_array_equal(case.target, expected)


@pytest.mark.parametrize("shared_max", [99 << 10, rows.SHARED_BYTES_MAX])
@pytest.mark.parametrize("row_bytes", [528, 656, 1152, 2304, 20_000])
def test_a_ring_fits_into_shared_memory(row_bytes, shared_max):
    form = rows.ring_form(row_bytes, shared_max=shared_max)
    assert 2 <= form.in_flight <= rows.RING_DEPTH_MAX
    assert form.shared_bytes <= shared_max
    assert form.shared_bytes % 8 == 0


@pytest.mark.parametrize("row_bytes", few([656], all_of=[656, 1152]))
def test_a_ring_moves_the_same_where_a_block_has_99_KiB(row_bytes, folder):
    form, case = rows.ring_form(row_bytes, shared_max=99 << 10), Case(row_bytes, 70)
    expected = case.expected(70)
    run(form, case, case.record(), folder, threads=form.threads)
    np.testing.assert_array_equal(case.target, expected)


def test_blocks_are_as_many_as_have_something_to_do():
    form = rows.flat_form(656)
    blocks = [form.blocks(count, block_count_max=4) for count in (0, 1, 99, 100, 300, 10_000)]
    assert blocks[0] == blocks[1] == 1
    assert blocks[-1] == 4
    assert all(each <= other for each, other in pairwise(blocks))


@pytest.mark.parametrize("wrong", [(654,), (656, 2), (656, 16, 3)])
def test_rows_of_odd_bytes_are_refused(wrong):
    with pytest.raises(BadInput, match="multiples of 4"):
        rows.flat_form(*wrong)
