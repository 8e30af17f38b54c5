"""What a step is begun with, and what ends it: whose rows lie there, a block that is left early."""

from __future__ import annotations

import pytest

from ess.errors import BadInput
from tests.support.manual_lane import ManualLane
from tests.unit.door.test_door import LAYOUT, make, opened, refused, rows, selection


@pytest.fixture
def offload():
    with make() as made:
        yield made


def test_the_end_of_a_block_gives_an_open_step_up(offload):
    sequence = opened(offload)
    with pytest.raises(BadInput), offload.begin([sequence], query_counts=[1]) as step:
        step.append(9, rows(1))
    assert step.state == "learned"
    assert sequence.length == 10
    with offload.begin([sequence], query_counts=[1]) as step:
        for layer in range(LAYOUT.layer_total):
            step.append(layer, rows(1))
        step.commit(accepted=[1])
    assert sequence.length == 11
    offload.check()


def test_a_sequence_that_is_in_a_step_twice_is_named(offload):
    first, other = opened(offload), opened(offload)
    twice = [first, other, other]
    call = lambda: offload.begin(twice, query_counts=[1] * 3)  # noqa: E731
    refused(offload, BadInput, f"sequence {other.number} is in the step twice", call)


def test_an_import_that_was_forgotten_is_noticed(offload):
    """The step begins at position 0, where the row of another token belongs."""
    sequence = offload.open(list(range(11)))
    step = offload.begin([sequence], query_counts=[1])
    for layer in range(3):
        step.append(layer, rows(1))
    chosen = selection(*range(8))
    match = "is position 1, which is outside its context of 1 tokens"
    refused(offload, BadInput, match, lambda: step.resolve(0, chosen))
    match = "was opened with token 0 at position 0, and tokens has 10 there"
    refused(offload, BadInput, match, lambda: step.commit(accepted=[1], tokens=[[10]]))
    assert sequence.length == 0
    step.abandon()
    for layer in range(3):
        sequence.import_rows(layer, 0, rows(10))
    assert offload.begin([sequence], query_counts=[1]).query_start.tolist() == [10]


def test_a_sequence_whose_rows_were_not_imported_has_another_token(offload):
    unready = offload.open(list(range(30, 50)))
    step = offload.begin([unready], query_counts=[1])
    for layer in range(3):
        step.append(layer, rows(1))
    said = "tokens has 49 there: its rows from position 0 on were not imported"
    refused(offload, BadInput, said, lambda: step.commit(accepted=[1], tokens=[[49]]))
    step.commit(accepted=[1])


def test_rows_count_that_are_on_their_way_to_the_host_when_others_are_imported():
    with make(lane=ManualLane(seed=1, delay_max=1 << 20)) as offload:
        sequence = offload.open(list(range(15)))
        for layer in range(3):
            sequence.import_rows(layer, 0, rows(4))
        step = offload.begin([sequence], query_counts=[1], starts=[4])
        for layer in range(3):
            step.append(layer, rows(1))
        step.commit(accepted=[1], tokens=[[4]])
        for layer in range(3):
            sequence.import_rows(layer, 5, rows(9))
        assert offload._pools.inflight.pending_count
        assert offload.begin([sequence], query_counts=[1]).query_start.tolist() == [14]
