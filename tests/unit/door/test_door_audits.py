"""The parts of the door find a fault in themselves: a case breaks one thing, the audit names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ess.door import Offload
from ess.door.memory.inflight import InFlight
from ess.errors import BadState
from ess.flashtrans import InlineLane
from ess.flashtrans.views import known
from ess.kernels.streams import RowCopy
from tests.support.manual_lane import ManualLane
from tests.unit.door.test_door import make, opened, rows


def world() -> tuple[Offload, object]:
    """A sequence that was looked up and refilled, and an open step with its new row in layer 0."""
    offload = make(lane=InlineLane())
    sequence = opened(offload)
    offload.refill([sequence])
    offload.all_resident([sequence])
    step = offload.begin([sequence], query_counts=[2])
    step.append(0, rows(2))
    offload.check()
    return offload, sequence


def answer(offload: Offload, sequence: object) -> None:
    answers = offload._side.resident._answers
    step = offload._pools.sparse.step
    answers[sequence.number] = replace(
        answers[sequence.number], is_resident=True, until_step=step + 1
    )


def claim(offload: Offload, change: Callable[[np.ndarray], None]) -> None:
    change(offload._side.slots._claimed[0])


FAULTS = {
    "another page": (
        lambda offload, sequence: setattr(
            sequence.holding, "host_pages", sequence.holding.host_pages + 1
        ),
        "names other pages than it holds",
    ),
    "no reservation": (
        lambda offload, sequence: setattr(sequence.holding, "_reservation", None),
        "has no reservation",
    ),
    "a slot twice": (
        lambda offload, sequence: claim(offload, lambda slots: slots.fill(slots[0])),
        "a slot for two new rows",
    ),
    "a clean slot": (
        lambda offload, sequence: claim(
            offload, lambda slots: offload._pools.sparse._dirty.__setitem__(slots, 0)
        ),
        "as old as its host",
    ),
    "an event": (
        lambda offload, sequence: (
            offload._side.slots._claimed.clear(),
            setattr(offload._side.slots, "_last_event", object()),
        ),
        "a fetch of no step",
    ),
    "resident until": (answer, "is_resident=True"),
    "hits lost": (
        lambda offload, sequence: offload._side.budgets._hits[0].__setitem__(3, 99),
        "group 0 has lost hits",
    ),
    "a step to come": (
        lambda offload, sequence: setattr(offload._side.budgets, "_step", 1 << 20),
        "looked at in step 1048576",
    ),
    "misses": (
        lambda offload, sequence: offload._side.budgets._misses.__setitem__(0, -1),
        "misses",
    ),
}


@pytest.mark.parametrize(("fault", "finding"), FAULTS.values(), ids=FAULTS)
def test_the_door_audits_itself(fault: Callable, finding: str) -> None:
    offload, sequence = world()
    fault(offload, sequence)
    with pytest.raises(AssertionError, match=finding):
        offload.check()


def test_a_lane_that_overtakes_itself_is_found() -> None:
    """A later copy is done, an earlier one is not."""
    inflight, row = InFlight(ManualLane(delay_max=99)), np.zeros((1, 4), np.uint8)
    events = [inflight.submit([RowCopy(source=row, target=row.copy())], print) for _ in range(2)]
    inflight.check()
    events[0].wait()
    inflight.check()
    inflight._pending.reverse()
    with pytest.raises(AssertionError, match="a later copy is done"):
        inflight.check()


def test_a_wait_that_is_broken_off_loses_no_commit() -> None:
    lane, row, said = ManualLane(), np.zeros((1, 4), np.uint8), list[int]()
    inflight, copy = InFlight(lane), RowCopy(source=row, target=row.copy())
    lane.hold()
    for number in range(2):
        inflight.submit([copy], lambda number=number: said.append(number))
    with pytest.raises(BadState, match="waiting for ever"):
        inflight.drain()
    lane.release()
    inflight.drain()
    assert said == [0, 1]


def test_a_wait_commits_what_was_submitted_up_to_it_and_nothing_behind_it() -> None:
    lane, row = ManualLane(delay_max=0), known(np.zeros((1, 4), np.uint8))
    inflight, said, numbers = InFlight(lane), list[int](), np.zeros(1, np.int32)
    copy = RowCopy(source=row, source_rows=numbers, target=row, target_rows=numbers)
    events = [inflight.submit([copy], lambda n=n: said.append(n)) for n in range(4)]
    inflight.settle_until(events[1])
    assert said == [0, 1]
    inflight.settle_until(events[0])
    assert said == [0, 1], "a second wait commits nothing"
    inflight.after(lambda: said.append(9))
    inflight.settle_until(events[3])
    assert said == [0, 1, 2, 3]
    inflight.settle()
    assert said == [0, 1, 2, 3, 9]
    assert inflight.pending_count == 0
    inflight.check()
