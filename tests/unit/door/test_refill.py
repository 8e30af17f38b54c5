"""Free slots are filled again: bounded, behind the steps, never at the cost of a row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ess.door.residency import refill
from ess.door.residency.walks import Walks
from ess.errors import BadState
from ess.units import div_ceil
from tests.support.move_budget import move_budget
from tests.unit.door.test_door import make, opened, rows, selection
from tests.unit.door.test_residency import decode, filled, roomy, truly_resident


def settled(offload, *sequences) -> int:
    """Refills until nothing is started any more; returns how many rows of all groups were."""
    total = 0
    while count := offload.refill(sequences):
        total += count
        offload.drain()
        offload.check()
        for layer in range(3):
            assert offload.verify(layer) == []
    return total


def pushed_out(offload, *, length: int = 60):
    """A sequence that had all of its rows in slots, and another that has taken some of them."""
    first, second = filled(offload, length), filled(offload, length)
    offload.drain()
    for start in range(0, length, 8):
        decode(offload, second, chosen=tuple(range(start, min(start + 8, length))))
        offload.drain()
    assert not truly_resident(offload, first)
    return first, second


@pytest.fixture
def looked(monkeypatch) -> list[int]:
    """One entry for every look."""
    seen: list[int] = []
    walk_on = refill.Refill._walk_on
    monkeypatch.setattr(refill.Refill, "_walk_on", lambda *given: seen.append(1) or walk_on(*given))
    return seen


def test_what_was_pushed_out_comes_back_when_there_is_room(looked):
    with roomy(128) as offload:
        first, second = pushed_out(offload, length=100)
        assert offload.refill([first, second]) == 0, "no row gives way"
        assert not looked
        second.close()
        offload.drain()
        assert settled(offload, first) > 0
        assert offload.all_resident([first])
        assert truly_resident(offload, first)
        assert not offload.is_scarce
        decode(offload, first)


def test_a_resumed_sequence_comes_back_too():
    with roomy(128) as offload:
        sequence = filled(offload, 60)
        sequence.preempt()
        assert offload.refill([sequence]) == 0
        sequence.resume()
        assert settled(offload, sequence) == 60 * 2
        assert offload.all_resident([sequence])


def test_a_look_is_bounded_and_goes_on_where_it_was(monkeypatch):
    monkeypatch.setattr(refill, "LOOK_PAGES", 2)
    monkeypatch.setattr(refill, "FILL_ROWS", 64)
    with make(slot_bytes=1 << 16) as offload:
        sequence = opened(offload, 150)
        started = []
        while not offload.all_resident([sequence]):
            started.append(offload.refill([sequence]))
            offload.drain()
        assert started == [2 * 64, 2 * 64, 2 * 22], "128 and 22 rows of two groups"


def test_a_look_is_at_some_groups_only(monkeypatch):
    monkeypatch.setattr(refill, "GROUPS", 1)
    with make(slot_bytes=1 << 16) as offload:
        sequence = opened(offload, 100)
        assert [offload.refill([sequence]) for _ in range(3)] == [100, 100, 0]


def test_a_tenth_stays_free_and_a_vain_walk_rests(looked):
    """One group is too small for the rows: the walk rests until a row departs."""
    with roomy(256) as offload:
        assert move_budget(offload, source=0, target=1)
        small, large = offload.stats().slot_count.tolist()
        sequence = opened(offload, 200)
        assert settled(offload, sequence) == small - div_ceil(small, 10) + 200
        assert not offload.is_scarce
        assert small < 200 < large
        other = filled(offload, 5)
        offload.drain()
        looks = len(looked)
        for _ in range(5):
            assert offload.refill([sequence]) == 0
        assert len(looked) == looks
        other.close()
        assert offload.refill([sequence]) == 0
        assert len(looked) == looks + 1


def test_steps_under_way_are_not_waited_for():
    with roomy(256) as offload:
        sequence = opened(offload, 60)
        step = offload.begin([sequence], query_counts=[2])
        with pytest.raises(BadState, match="is open"):
            offload.refill([sequence])
        for layer in range(3):
            step.append(layer, rows(2))
            if layer in (0, 2):
                step.resolve(layer, selection(0, queries=2)).wait()
        step.seal(accepted=[1])
        assert offload.refill([sequence]) == 2 * 59, "row 0 is there; rows above 60 are not known"
        step.learn(accepted=[1])
        offload.drain()
        offload.check()
        assert offload.all_resident([sequence])


def test_a_row_that_the_mtp_module_never_made_stays_absent():
    with roomy(256) as offload:
        sequence = offload.open(list(range(61)))
        for layer in range(3):
            sequence.import_rows(layer=layer, start=0, rows=rows(60 - (layer == 2)))
        assert settled(offload, sequence) == 60 + 59
        assert offload.all_resident([sequence]), "it is asked of the main model's layers"


def test_free_slots_that_come_with_a_budget_end_the_rest(looked, monkeypatch):
    monkeypatch.setattr(refill, "LOOK_PAGES", 1)
    with roomy(256) as offload:
        assert move_budget(offload, source=0, target=1)
        sequence = opened(offload, 3 * 64)
        count = sum(offload.refill([sequence]) for _ in range(9))
        assert count < 2 * 3 * 64
        assert len(looked) == 3, "once around"
        assert move_budget(offload, source=1, target=0), "a chunk of which no slot was used"
        assert count + sum(offload.refill([sequence]) for _ in range(9)) == 2 * 3 * 64
        assert len(looked) == 6
        offload.drain()
        assert offload.all_resident([sequence])


def test_rows_that_arrive_late_end_the_rest():
    """Though one group has no room left for them."""
    with roomy(256) as offload:
        assert move_budget(offload, source=0, target=1)
        sequence = offload.open(list(range(221)))
        started = []
        for start, count in ((0, 200), (200, 20)):
            for layer in range(3):
                sequence.import_rows(layer=layer, start=start, rows=rows(count))
            started.append(settled(offload, sequence))
        small = offload.stats().slot_count[0]
        assert started == [small - div_ceil(small, 10) + 200, 20]


def test_a_walk_rests_until_a_row_departs_that_it_may_have_passed():
    """Then the walk goes around again: it has not seen that the row is absent."""
    sequence, walks = SimpleNamespace(number=0, arrival_count=1, length=130), Walks(1)
    for departed_count in (5, 6, 6):
        _, walk = walks.next([sequence], departed_count)
        came_around = walks.turn(sequence, walk, 0)
        walks.check(1, departed_count)
    assert came_around
    assert walks.next([sequence], 6) == (sequence, walk)
    assert [walks.turn(sequence, walk, 0) for _ in range(3)] == [False, False, True]
    assert walks.next([sequence], 6) is None
