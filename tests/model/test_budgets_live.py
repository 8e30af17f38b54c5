"""Slots go where they save most: curves read from a running pool, and a skewed trace."""

from __future__ import annotations

import numpy as np
import pytest

from ess.door import Offload
from ess.door.residency import budgets
from ess.errors import BadState
from ess.flashtrans import InlineLane
from ess.pool.budget import best_division, live_curve, next_move
from ess.units import PAGE_ROWS
from tests.model.world import GROUPED, ROW_BYTES, SINGLE, TOP_K
from tests.support.move_budget import move_budget

LENGTH = 1900
WIDE, NARROW = LENGTH, 150


def offload_of(layout, chunks: int) -> Offload:
    return Offload.create(
        layout,
        slot_bytes=chunks * layout.group_layers_max * PAGE_ROWS * ROW_BYTES,
        host_bytes=layout.host_page_bytes * 40,
        length_max=2400,
        query_max=8,
        sequence_max=2,
        lane=InlineLane(),
    )


class Trace:
    """A long sequence; each group selects within a reach of its own, near its front most often."""

    def __init__(self, offload: Offload, reaches: list[int], seed: int = 0) -> None:
        self.offload, self.reaches = offload, reaches
        self.random = np.random.default_rng(seed)
        self.sequence = offload.open(list(range(LENGTH)))
        layout = offload.layout
        rows = np.zeros((LENGTH, ROW_BYTES), np.uint8)
        for layer in range(layout.layer_total):
            self.sequence.import_rows(layer=layer, start=0, rows=rows)
        self.order = [self.random.permutation(LENGTH) for _ in reaches]

    def run(self, steps: int, every: int) -> int:
        """Returns how many chunks have moved."""
        moved = 0
        for number in range(1, steps + 1):
            self._step()
            if every and number % every == 0:
                moved += self.offload.rebalance()
                self.offload.check()
        return moved

    def _step(self) -> None:
        offload, layout = self.offload, self.offload.layout
        step = offload.begin([self.sequence], query_counts=[1])
        row = np.zeros((1, ROW_BYTES), np.uint8)
        for layer in range(layout.layer_total):
            group = layout.group_of(layer)
            leads = layout.groups[group][0] == layer
            step.append(layer, row)
            chosen = self._select(group) if leads else None
            step.resolve(layer, chosen).wait()
        step.abandon()

    def _select(self, group: int) -> np.ndarray:
        drawn = (self.reaches[group] * self.random.random(4 * TOP_K) ** 2).astype(int)
        _, first = np.unique(drawn, return_index=True)
        chosen = self.order[group][drawn[np.sort(first)[:TOP_K]]]
        selection = np.full((1, TOP_K), -1, np.int32)
        selection[0, : len(chosen)] = np.sort(chosen)
        return selection


def fetched(trace: Trace, steps: int, every: int) -> int:
    before = trace.offload.stats().fetched_bytes.sum()
    trace.run(steps, every)
    return int(trace.offload.stats().fetched_bytes.sum() - before)


@pytest.mark.parametrize("layout", [SINGLE, GROUPED], ids=lambda layout: layout.name)
def test_slots_move_to_the_group_with_more_misses_and_misses_fall(layout):
    reaches = [NARROW] * layout.group_count
    reaches[1] = WIDE
    traces = [Trace(offload_of(layout, 24), reaches) for _ in range(2)]
    fixed, live = traces
    before = live.offload.stats().slot_count
    assert fixed.run(600, every=0) == 0
    moved = live.run(600, every=30)
    after = live.offload.stats().slot_count
    assert moved >= 4
    assert after[1] > before[1] * 1.5
    assert all(after[group] <= before[group] for group in range(layout.group_count) if group != 1)
    assert fetched(live, 150, 0) < 0.9 * fetched(fixed, 150, 0)
    assert live.run(300, every=30) <= 2, "it does not settle"


def test_many_chunks_move_by_pieces(monkeypatch):
    """As many chunks together as leave so many pieces; curves are what they are by chunks."""
    curves, next_move = [], budgets.next_move
    monkeypatch.setattr(
        budgets, "next_move", lambda *given: (curves.append(given[0]), next_move(*given))[1]
    )
    fine, coarse = (Trace(offload_of(SINGLE, 27), [WIDE, NARROW, NARROW]) for _ in range(2))
    fine.run(30, every=30)
    by_chunks = curves.copy()[0]
    monkeypatch.setattr(budgets, "PIECES", 12)
    monkeypatch.setattr(budgets, "PIECES_EACH", 1)
    curves.clear()
    assert coarse.offload._pools.sparse.chunks.counts() == [9, 9, 9]
    monkeypatch.setattr(coarse.offload._pools.sparse.chunks, "_most", [12, 12, 12])
    assert coarse.run(60, every=30) > 0
    moves = np.array(coarse.offload._pools.sparse.chunks.counts()) - 9
    assert moves.any()
    assert not (moves % 2).any()
    for curve, by_chunk in zip(curves[0], by_chunks, strict=True):
        assert curve.size == 27 // 2 + 1
        np.testing.assert_allclose(curve[:5], by_chunk[1:10:2], err_msg="up to its nine chunks")
        assert (curve[5:] == curve[5]).all(), "a sixth piece would make 13 chunks"
    coarse.offload.check()


def test_equal_groups_keep_what_they_have():
    trace = Trace(offload_of(SINGLE, 24), [WIDE] * 3)
    assert trace.run(600, every=30) <= 2


def test_budgets_never_cut_into_promises():
    offload = offload_of(SINGLE, 9)
    trace = Trace(offload, [NARROW, WIDE, NARROW])
    promised = offload._pools.ledger.promised("slots")
    assert promised > 0
    trace.run(900, every=30)
    assert offload.stats().slot_count.min() >= max(promised, 8)
    while move_budget(offload, source=0, target=1):
        pass
    offload.check()
    step = offload.begin([trace.sequence], query_counts=[1])
    with pytest.raises(BadState, match="is open: commit or abandon it first"):
        offload.rebalance()
    step.abandon()


@pytest.mark.parametrize("reach", [1000, WIDE])
def test_the_curve_below_is_what_a_smaller_pool_would_miss(reach):
    """Within what rows of equal age and the ends of the trace make of it."""
    small, large = (Trace(offload_of(SINGLE, 3 * n), [reach] * 3, seed=4) for n in (5, 9))
    misses = []
    for trace in (small, large):
        trace.run(400, every=0)
        begun = trace.offload._pools.sparse.hit_age(0)
        counted = trace.offload.stats().miss_count[0]
        trace.run(400, every=0)
        misses.append((trace.offload.stats().miss_count[0] - counted) / 400)
    sparse = large.offload._pools.sparse
    curve = live_curve(
        hits=(sparse.hit_age(0) - begun) / 400,
        rows=sparse.resident_age(0),
        misses=misses[1],
        slots=sparse.slot_count(0),
        chunk=PAGE_ROWS,
        chunk_count=12,
    )
    assert curve[9] == pytest.approx(misses[1])
    assert curve[5] == pytest.approx(misses[0], rel=0.05)
    assert misses[0] > 1.1 * misses[1]
    assert (np.diff(curve) <= 0).all()


def test_a_curve_by_hand():
    hits, rows = np.zeros(256), np.zeros(256, np.int64)
    hits[1], hits[2], hits[9] = 4.0, 2.0, 1.0
    rows[1], rows[2], rows[9] = 64, 32, 32
    curve = live_curve(hits=hits, rows=rows, misses=3.0, slots=128, chunk=64, chunk_count=4)
    assert curve[:3].tolist() == [10.0, 6.0, 3.0]
    assert curve[3:].tolist() == pytest.approx([3 * np.exp(-1), 3 * np.exp(-2)])
    given = {"hits": hits, "rows": rows, "misses": 3.0, "slots": 128, "chunk_count": 2}
    beside = live_curve(**given, chunk=64, first=64)
    assert beside.tolist() == curve[1:4].tolist(), "the same sizes"
    free = live_curve(hits=hits, rows=rows, misses=3.0, slots=192, chunk=64, chunk_count=4)
    assert free[3:].tolist() == [3.0, 3.0], "free slots: its misses are first touches"


def move(curves, chunks, floors):
    return next_move(curves, chunks, floors, best_division(curves, chunks, floors))


def test_the_next_move():
    steep = np.array([100.0, 60, 40, 30, 25, 22, 20])
    flat = np.array([10.0, 2, 1, 1, 1, 1, 1])
    assert move([steep, flat], [2, 4], [1, 1]) == (1, 0)
    assert move([steep, flat], [2, 4], [1, 4]) is None, "all of it is promised"
    assert move([steep, flat], [2, 4], [3, 4]) is None, "no group gives of its floor"
    for scale in (1, 1e-3):
        assert move([scale * steep, scale * flat], [2, 4], [3, 1]) == (1, 0)
    assert move([steep, flat], [5, 1], [1, 1]) is None, "it is the best already"
    assert move([steep * 0 + 1, flat * 0 + 1], [3, 3], [1, 1]) is None
    mild = np.array([50.0, 30, 10, 9, 8.9, 8.8, 8.7, 8.6, 8.5])
    starved = np.array([100.0, 60, 30, 10, 9, 8.9, 8.8, 8.7, 8.6])
    groups = [mild * 0 + 1, mild, starved]
    assert move(groups, [4, 3, 1], [1, 1, 1]) == (0, 2), "to the group that lacks most"
    close = np.array([100.0, 99, 98, 97, 96, 95, 94])
    assert move([close, close * 0], [2, 4], [1, 1]) is None, "3 % are not worth it"
