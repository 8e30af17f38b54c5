"""Slots change their layer group, on a device as on the host, and what is known of residents: run
by test_doors.py."""

from __future__ import annotations

import numpy as np
import pytest

from ess.door.device.steps.fetches import StepFetches
from ess.door.residency import budgets
from ess.kernels.cuda.streams import CudaEvent
from ess.pool.lru.cuda_shape import REPORT
from tests.door_device.doors import LAYOUT, there
from tests.door_device.played import made, step  # noqa: F401  a fixture


@pytest.fixture
def turns(monkeypatch):
    """The group with most chunks gives one to the next: curves only show what each side knows."""
    seen = []

    def forced(curves, chunks, floors, wanted):
        seen.append((np.array(curves), list(chunks), list(floors)))
        source = int(np.argmax(np.array(chunks) - np.array(floors)))
        return (source, (source + 1) % len(chunks)) if chunks[source] > floors[source] else None

    monkeypatch.setattr(budgets, "next_move", forced)
    monkeypatch.setattr(budgets, "SHARE", 4)
    return seen


def rebalanced(doors, turns):
    """How many chunks have moved on both sides, which were told the same."""
    turns.clear()
    moved = [door.rebalance() for door in (doors.host, doors.device)]
    assert moved[0] == moved[1] == len(turns) // 2
    for here, away in zip(turns[: moved[0]], turns[moved[0] :], strict=True):
        np.testing.assert_allclose(here[0], away[0])
        assert here[1:] == away[1:]
    doors.compare()
    return moved[0]


@pytest.mark.parametrize("style", ["whole", "halves"])
def test_chunks_move_between_steps_and_nothing_is_lost(made, turns, style):  # noqa: F811
    doors = made(chunks=6, seed=14)
    pairs = [doors.open(list(range(n, 2 * n))) for n in (70, 33, 130)]
    moved, slots = 0, set()
    for turn in range(9):
        counts = doors.random.integers(1, 4, 3).tolist()
        accepted = [int(doors.random.integers(0, count + 1)) for count in counts]
        step(doors, pairs, counts, style, accepted)
        doors.drain()
        slots.add(tuple(doors.device.stats().slot_count.tolist()))
        if turn % 3 == 2:
            moved += rebalanced(doors, turns)
    assert moved >= 3
    assert len(slots) > 1
    assert doors.host.stats().evicted_count.sum() > 0
    doors.audit()


def test_a_landing_on_its_way_is_waited_for_by_nobody(made, turns, monkeypatch):  # noqa: F811
    doors = made(chunks=12, seed=15)
    pair = doors.open(list(range(200)))
    step(doors, [pair], [1], "whole", [1])
    doors.drain()
    side = doors.device._side
    monkeypatch.setattr(type(side.landings), "is_busy", True)
    assert doors.device.rebalance() == 0
    monkeypatch.undo()
    assert not turns


def test_what_was_resident_is_looked_at_again(made, turns):  # noqa: F811
    """Rows may have left with their chunk: no sequence is known to be resident before it is looked
    at again."""
    doors = made(chunks=24, seed=16)
    pairs = [doors.open(list(range(n, 2 * n))) for n in (70, 90)]
    for pair in pairs:
        doors.each(pair, "fill", says=False)
    doors.drain()
    mine = [pair[1] for pair in pairs]
    for _turn in range(3):
        step(doors, pairs, [1, 1], "whole", [0, 0])
        doors.drain()
        is_known = doors.device.all_resident(mine)
    assert is_known
    assert rebalanced(doors, turns)
    assert not doors.device.all_resident(mine)
    doors.audit()


def test_a_group_grows_no_further_than_its_kernels_reach(made, turns, monkeypatch):  # noqa: F811
    doors = made(chunks=24, seed=17)
    sparse = doors.device._pools.sparse
    curves = []
    monkeypatch.setattr(budgets, "next_move", lambda *given: curves.append(given[0]))
    monkeypatch.setattr(sparse.chunks, "_most", [9 for _ in LAYOUT.groups])
    step(doors, [doors.open(list(range(100)))], [1], "whole", [1])
    doors.drain()
    doors.device.rebalance()
    for curve in curves[0]:
        assert (curve[9:] == curve[9]).all()


def test_chunks_move_by_pieces(made, turns, monkeypatch):  # noqa: F811
    """Of many chunks; those that no piece has room for stay where they are."""
    monkeypatch.setattr(budgets, "PIECES", 8)
    monkeypatch.setattr(budgets, "PIECES_EACH", 1)
    doors = made(chunks=27, pages=24, seed=25)
    pairs = [doors.open(list(range(n, 2 * n))) for n in (70, 33, 130)]
    for _turn in range(3):
        step(doors, pairs, [2, 1, 3], "whole", [1, 0, 2])
    counts = [door._pools.sparse.chunks.counts() for door in (doors.host, doors.device)]
    turns.clear()
    moved = [door.rebalance() for door in (doors.host, doors.device)]
    assert moved[0] == moved[1] == 3 * len(turns) // 2
    assert moved[0] > 0
    given = [count // 3 for count in counts[0]]
    assert turns[0][1] == given, "pieces of three"
    assert len(turns[0][0][0]) == 27 // 3 + 1
    doors.audit()


def test_what_is_resident_follows_from_one_copy_of_the_counts(made, monkeypatch):  # noqa: F811
    """A copy lands while the host asks: in it rows have given way to work that it has ended."""
    doors = made(chunks=24, seed=27)
    pair = doors.open(list(range(70)))
    doors.each(pair, "fill", says=False)
    doors.drain()
    counting = doors.device._pools.counting
    while not doors.device.all_resident([pair[1]]):
        counting.wait()
    counting.claims(np.full(LAYOUT.group_count, 1 << 20))
    at = [REPORT.index("claimed"), REPORT.index("evicted")]
    counting.totals[0, :, at] += 5
    counting.send()
    done, late = CudaEvent.done, [False]
    monkeypatch.setattr(CudaEvent, "done", lambda event: late.pop() if late else done(event))
    assert not doors.device.all_resident([pair[1]])
    assert not late, "the host has not asked"
    counting.totals[0, :, at] -= 5


def test_new_rows_that_make_others_give_way_end_a_stay_of_all_rows(made):  # noqa: F811
    """A step claims slots for its new rows before it selects. Its group has eight that are free,
    and not so few that selected rows are stamped."""
    doors = made(chunks=3, seed=28)
    mine = doors.open(list(range(57)))[1]
    mine.fill()
    doors.device.drain()
    slot_of, rows = doors.device._pools.sparse.slot_of[0], there(mine.holding.row_ids(0, 56))
    while not doors.device.all_resident([mine]):
        doors.device._pools.counting.wait()
    for count in (8, 9):
        with doors.device.begin([mine], query_counts=[count]) as step:
            is_known = doors.device.all_resident([mine])
            step.places(0)
            has_all = bool((slot_of.index_select(0, rows) >= 0).all())
        assert is_known == has_all == (count == 8)
    doors.device.check()


def test_no_step_ends_whose_slots_have_lost_their_copies(made, monkeypatch):  # noqa: F811
    """Slots are claimed, and Ctrl-C comes before their copies are queued: a later step would take
    the slots for rows."""
    doors = made(chunks=12, seed=25)
    steps = doors.begin([doors.open(list(range(70)))], [1])
    doors.append(steps, 0)
    selection = doors.select(steps, 0)

    def broken(*_given):
        raise KeyboardInterrupt

    monkeypatch.setattr(StepFetches, "queue", broken)
    with pytest.raises(KeyboardInterrupt):
        steps[1].resolve(0, there(selection))
    monkeypatch.undo()
    with pytest.raises(AssertionError, match=r"0 of 1 copies .* can only be closed"):
        steps[1].abandon()
