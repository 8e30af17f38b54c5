"""Rows that land behind a prompt, piece by piece, and stores that are late: run by
test_doors.py."""

from __future__ import annotations

import numpy as np
import pytest

from ess.door.device.memory.arenas import TICKET_MAX
from ess.errors import BadState
from ess.kernels.cuda.streams import CudaEvent
from ess.pool.device_bytes import SEALS
from ess.pool.lru.cuda import Residency
from tests.door_device.doors import LAYOUT, LEADERS, there, whole
from tests.door_device.played import made, step, windows  # noqa: F401  a fixture
from tests.unit.door.test_broken_off import check_case


def test_pieces_that_wait_end_with_the_stay_of_their_sequence(made):  # noqa: F811
    """Behind a resume its rows have other names; what still waits would fill slots of others."""
    doors = made(chunks=24, seed=19)
    mine, landings = doors.open(list(range(70)))[1], doors.device._side.landings
    free, landings._free = landings._free, []
    mine.fill()
    assert landings._waiting
    mine.preempt()
    mine.resume()
    landings._free = free
    landings.go_on()
    assert not landings._under_way
    assert not landings._waiting
    doors.device.check()


def test_pieces_that_wait_begin_when_others_have_landed(made):  # noqa: F811
    """More groups than there are places: nothing but the next look between steps comes by."""
    doors = made(chunks=24, seed=20)
    mine, landings = doors.open(list(range(70)))[1], doors.device._side.landings
    spare, landings._free = landings._free[1:], landings._free[:1]
    mine.fill()
    waiting = len(landings._waiting)
    assert waiting == LAYOUT.group_count - 1
    for _turn in range(waiting):
        doors.device._pools.lane.landings.synchronize()
        doors.device.refill([mine])
    assert not landings._waiting
    doors.device._pools.lane.landings.synchronize()
    landings.behind()
    landings._free += spare
    doors.device.drain()
    rows = there(mine.holding.row_ids(0, mine.length))
    for slot_of in doors.device._pools.sparse.slot_of:
        assert (slot_of.index_select(0, rows).cpu() >= 0).all(), "a group that was not filled"
    doors.device.check()


@pytest.fixture
def holds(monkeypatch):
    """(stream of the event, stream that waits), as they come; and when rows leave."""
    seen, recorded = [], {}
    record, hold, drop = CudaEvent.record, CudaEvent.hold, Residency.drop

    def recording(event, stream, **how):
        recorded[event.handle] = stream
        return record(event, stream, **how)

    def holding(event, stream):
        seen.append((recorded.get(event.handle), stream))
        hold(event, stream)

    def dropping(residency, rows, **named):
        seen.append("drop")
        drop(residency, rows, **named)

    monkeypatch.setattr(CudaEvent, "record", recording)
    monkeypatch.setattr(CudaEvent, "hold", holding)
    monkeypatch.setattr(Residency, "drop", dropping)
    return seen


def test_slots_are_not_given_up_while_a_landing_fills_them(made, holds):  # noqa: F811
    """Without a step under way nothing else keeps compute behind the copies."""
    doors = made(chunks=24, seed=21)
    mine, lane = doors.open(list(range(70)))[1], doors.device._pools.lane
    mine.fill()
    assert doors.device._side.landings._under_way
    holds.clear()
    mine.close()
    assert "drop" in holds
    assert (lane.landings.handle, lane.compute) in holds[: holds.index("drop")]


def test_a_request_that_ends_waits_for_no_landing_of_another(made, holds):  # noqa: F811
    """Neither what compute does next nor the fetches of the next step."""
    doors = made(chunks=24, seed=23)
    pairs = [doors.open(list(range(n, 2 * n))) for n in (33, 70)]
    lane = doors.device._pools.lane
    step(doors, pairs[:1], [1], "whole", [1])
    doors.each(pairs[1], "fill", says=False)
    assert doors.device._side.landings._under_way
    holds.clear()
    doors.close(pairs[0])
    while "drop" not in holds:
        doors.device._pools.inflight.settle()
    lane.mark()
    assert lane.landings.handle not in {streams[0] for streams in holds if streams != "drop"}
    step(doors, pairs[1:], [2], "whole", [1])
    doors.audit()


def test_tickets_that_run_out_start_over_beside_a_landing(made):  # noqa: F811
    """Landings use tickets up where steps fetch nothing, and some may always be under way."""
    doors = made(chunks=24, seed=24)
    pairs = [doors.open(list(range(n, 2 * n))) for n in (33, 70)]
    landings = doors.device._side.landings
    landings._ticket = landings._landed = TICKET_MAX + 1
    doors.each(pairs[1], "fill", says=False)
    assert landings._under_way
    step(doors, pairs, [1, 2], "whole", [1, 1])
    assert landings._ticket < 100
    doors.audit()


def test_pieces_begin_behind_an_open_step(made):  # noqa: F811
    """It has looked at what is free: its new rows need slots, and it may run RESIDENT."""
    doors = made(chunks=3, seed=29)
    mine, other = (doors.open(list(range(n, 2 * n)))[1] for n in (57, 33))
    mine.fill()
    doors.device.drain()
    while not doors.device.all_resident([mine]):
        doors.device._pools.counting.wait()
    slot_of = doors.device._pools.sparse.slot_of[0]
    rows = [there(each.holding.row_ids(0, count)) for each, count in ((mine, 56), (other, 32))]

    def in_slots():
        return [int((slot_of.index_select(0, each) >= 0).sum()) for each in rows]

    with doors.device.begin([mine], query_counts=[1]) as under_way:
        assert doors.device.all_resident([mine])
        other.warm(windows(doors, 32))
        doors.device.check()
        under_way.places(0)
        assert in_slots() == [56, 0]
    assert in_slots()[1] > 8, "more than were free"
    doors.device.check()


@pytest.fixture
def late(monkeypatch):
    """An event has passed once it was waited for. What was waited for, as it comes."""
    waited, known = [], set()
    done, wait, record = CudaEvent.done, CudaEvent.wait, CudaEvent.record

    def waiting(event, timeout_s=None):
        waited.append(event)
        known.add(event.handle)
        wait(event, timeout_s)

    def recording(event, stream, **how):
        known.discard(event.handle)
        return record(event, stream, **how)

    monkeypatch.setattr(CudaEvent, "done", lambda event: event.handle in known and done(event))
    monkeypatch.setattr(CudaEvent, "wait", waiting)
    monkeypatch.setattr(CudaEvent, "record", recording)
    return waited


def test_steps_that_are_learned_at_once_wait_for_stores(made, late, monkeypatch):  # noqa: F811
    """A caller that knows what is accepted looks at no result, and gets ahead of a slow device."""
    doors, appended = made(chunks=12, seed=30), []
    mine = doors.open(list(range(70)))[1]
    late.clear()
    for turn in range(SEALS + 2):
        rows = doors.bytes(LAYOUT.layer_total, LAYOUT.row_bytes)
        with doors.device.begin([mine], query_counts=[1]) as under_way:
            for layer in range(LAYOUT.layer_total):
                keys = there(doors.bytes(1, 12)) if layer in LEADERS else None
                under_way.append(layer, there(rows[layer : layer + 1]), keys=keys)
            under_way.commit(accepted=[1])
        appended.append(rows)
        assert len(late) == max(0, turn + 1 - SEALS)
    monkeypatch.undo()
    doors.device.drain()
    stored = mine.holding.host_rows(69, SEALS + 2)
    for layer, rows in enumerate(np.stack(appended, axis=1)):
        np.testing.assert_array_equal(doors.device.memory(layer).host.numpy()[stored], rows)
    doors.device.check()


def test_an_audit_before_the_first_call_of_a_step(made):  # noqa: F811
    """It leaves the numbers that the calls of the step read."""
    doors = made(chunks=24, seed=25)
    steps = doors.begin([doors.open(list(range(70)))], [2])
    doors.device.check()
    whole(doors, steps, range(LAYOUT.layer_total))
    doors.seal(steps, [1])
    doors.learn()
    doors.audit()


@pytest.mark.parametrize("name", ["open", "begin"])
def test_a_call_that_is_broken_off_changes_nothing(made, name):  # noqa: F811
    doors = made(chunks=24, seed=26, query_max=64)
    assert len(check_case(doors.device, name)) > 5
    landings, step = doors.device._side.landings, doors.device.owner.open_step
    assert landings.new_rows == (0 if step is None else 1)
    if step is not None:
        step.abandon()
    doors.device.check()


def test_windows_select_rows_whose_store_is_under_way(made, late):  # noqa: F811
    """As on the host, whose rows lie in slots. A row that was never written is refused, and then
    nothing of the other groups lands."""
    doors = made(chunks=24, seed=27)
    mine, landings = doors.open(list(range(70)))[1], doors.device._side.landings
    step(doors, [doors.sequences[0]], [1], "whole", [1])
    late.clear()
    chosen = np.full((LAYOUT.group_count, 1, LAYOUT.top_k), -1, np.int32)
    chosen[:, 0, :2] = 3, 69
    assert doors.device._pools.inflight.pending_count
    mine.warm(chosen)
    assert late
    doors.device.drain()
    latent = doors.device._pools.latent
    latent.stored[-1, mine.holding.host_pages[0]] ^= np.uint64(1 << 3)
    with pytest.raises(BadState, match=f"group {LAYOUT.group_count - 1}: 1 of 2 rows were never"):
        mine.warm(chosen)
    assert not landings._under_way
    assert not landings._waiting
