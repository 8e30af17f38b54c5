"""Rows that land behind a prompt, piece by piece: run by test_doors.py."""

from __future__ import annotations

from tests.door_device.doors import LAYOUT, there
from tests.door_device.played import made  # noqa: F401  a fixture


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
        doors.device._pools.lane.mark().wait()
        doors.device.refill([mine])
    assert not landings._waiting
    doors.device._pools.lane.mark().wait()
    landings.behind()
    landings._free += spare
    doors.device.drain()
    rows = there(mine.holding.row_ids(0, mine.length))
    for slot_of in doors.device._pools.sparse.slot_of:
        assert (slot_of.index_select(0, rows).cpu() >= 0).all(), "a group that was not filled"
    doors.device.check()


def test_slots_are_not_given_up_while_a_landing_fills_them(made, monkeypatch):  # noqa: F811
    """Without a step under way nothing else keeps compute behind the copies."""
    doors = made(chunks=24, seed=21)
    mine, lane = doors.open(list(range(70)))[1], doors.device._pools.lane
    mine.fill()
    assert doors.device._side.landings._under_way
    order, hold = [], lane.hold_for_copies
    monkeypatch.setattr(lane, "hold_for_copies", lambda: (order.append("hold"), hold()))
    residency = type(doors.device._side.landings._residencies.popitem()[1])
    dropped = residency.drop
    monkeypatch.setattr(
        residency, "drop", lambda *given, **named: (order.append("drop"), dropped(*given, **named))
    )
    mine.close()
    assert order[0] == "hold"
    assert "drop" in order
