"""Residency is exact: yes only while every row of the main layers has landed."""

from __future__ import annotations

from ess.door import Offload
from ess.door.residency.resident import PATIENCE
from tests.support.manual_lane import ManualLane
from tests.support.move_budget import move_budget
from tests.unit.door.test_door import LAYOUT, make, opened, rows, selection

CHUNK_BYTES = LAYOUT.chunk_bytes


def roomy(slots: int) -> Offload:
    """So many slots for group 0, whose slots are two rows each, and as many for the other."""
    made = make(slot_bytes=slots // 64 * 3 // 2 * CHUNK_BYTES)
    assert made.stats().slot_count.tolist() == [slots, slots]
    return made


def filled(offload: Offload, count: int = 10):
    sequence = opened(offload, count)
    sequence.fill()
    return sequence


def truly_resident(offload: Offload, *sequences) -> bool:
    """Row by row, without remembering anything."""
    pools = offload._pools
    return all(
        (pools.sparse.locate(0, pools.tables.rows(each.line, 0, each.length)) >= 0).all()
        for each in sequences
    )


def decode(offload: Offload, *sequences, chosen=(0,)) -> None:
    step = offload.begin(sequences, query_counts=[1] * len(sequences))
    for layer in (0, 1):
        step.append(layer, rows(len(sequences)))
        if layer == 0:
            step.resolve(0, selection(*chosen, queries=len(sequences))).wait()
    step.commit(accepted=[1] * len(sequences))


def test_rows_in_flight_are_not_resident_and_are_asked_for_again():
    lane = ManualLane(seed=0, delay_max=1)
    with make(lane=lane) as offload:
        lane.hold()
        sequence = filled(offload)
        assert not offload.all_resident([sequence])
        lane.release()
        offload.drain()
        assert offload.all_resident([sequence])


def test_new_rows_keep_a_sequence_resident():
    with make() as offload:
        sequence = filled(offload)
        offload.drain()
        for _ in range(20):
            assert offload.all_resident([sequence])
            decode(offload, sequence)
        assert sequence.length == 30
        assert truly_resident(offload, sequence)


def test_what_is_only_located_counts_as_hits():
    with make() as offload:
        sequence = filled(offload)
        offload.drain()
        step = offload.begin([sequence, opened(offload)], query_counts=[1, 1])
        for chosen in (selection(0, 3, 7), selection(*range(LAYOUT.top_k))):
            before = offload.stats().hit_count[0]
            assert step.locate_all(0, chosen, queries=range(1)) is not None
            assert offload.stats().hit_count[0] - before == int((chosen >= 0).sum())
        before = offload.stats().hit_count[0]
        assert step.locate_all(0, selection(0, 1), queries=range(1, 2)) is None
        assert offload.stats().hit_count[0] == before
        step.abandon()


def test_an_eviction_ends_it_at_once():
    """128 slots: two sequences of 60 fit, and rows of the third push some out."""
    with roomy(128) as offload:
        pair = [filled(offload, 60), filled(offload, 60)]
        offload.drain()
        assert offload.all_resident(pair)
        third = opened(offload, 60)
        for first in range(0, 60, 8):
            positions = tuple(range(first, min(first + 8, 60)))
            decode(offload, third, chosen=positions)
            offload.drain()
            assert offload.all_resident(pair) == truly_resident(offload, *pair)
        assert not offload.all_resident(pair)


def test_absent_rows_are_looked_up_again_after_a_while_only():
    with make() as offload:
        sequence = opened(offload)
        assert not offload.all_resident([sequence])
        sequence.fill()
        offload.drain()
        assert not offload.all_resident([sequence]), "asked a moment ago"
        other = opened(offload)
        for _ in range(PATIENCE):
            decode(offload, other)
        assert offload.all_resident([sequence])


def test_preemption_and_moved_budgets_end_it():
    with roomy(256) as offload:
        sequence = filled(offload)
        offload.drain()
        assert offload.all_resident([sequence])
        sequence.preempt()
        assert not offload.all_resident([sequence])
        sequence.resume()
        assert not offload.all_resident([sequence])
    with roomy(256) as offload:
        sequence = filled(offload, 120)
        offload.drain()
        assert offload.all_resident([sequence])
        while move_budget(offload, source=0, target=1):
            offload.drain()
            assert offload.all_resident([sequence]) == truly_resident(offload, sequence)


def test_slots_run_scarce_below_a_tenth():
    with roomy(128) as offload:
        filled(offload, 64)
        offload.drain()
        assert not offload.is_scarce
        filled(offload, 60)
        offload.drain()
        assert offload.is_scarce


def test_rows_that_arrive_later_are_looked_at():
    with roomy(128) as offload:
        sequence = offload.open(list(range(31)))
        for layer in range(3):
            sequence.import_rows(layer=layer, start=0, rows=rows(10))
        sequence.fill()
        offload.drain()
        assert offload.all_resident([sequence])
        for layer in range(3):
            sequence.import_rows(layer=layer, start=10, rows=rows(20))
        assert not offload.all_resident([sequence])
