"""A stage is called once when no handoff reads the pages of its part any more, and closes them
itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ess.door.handoff.endings import Lapsed, Sent
from ess.transfer.messages import Reason
from tests.handoff.tier import TOKENS, UID, Stage, Tier, tier, windows_of

KINDS = ("inprocess", "tcp", "unguarded")


@pytest.fixture(params=KINDS)
def two(request: pytest.FixtureRequest) -> Iterator[Tier]:
    with tier(request.param) as made:
        yield made


def told(made: Tier, stage: Stage, *, advance_s: float = 0.0) -> None:
    """The stage was called once, the sequence is unchanged, and the outcome existed before the
    call."""
    made.turn(lambda: bool(stage.closed), advance_s=advance_s)
    made.settle()
    assert stage.closed == [UID]
    assert [outcome.uid for outcome in stage.left] == [UID]
    assert stage.opened[UID].state == "preempted"
    assert len(stage.port.sender) == 0
    stage.close(UID)
    stage.offload.check()


def test_when_the_receiver_has_all_of_it(two: Tier) -> None:
    two.want()
    two.give()
    for stage in two.stages:
        told(two, stage)
        assert isinstance(stage.left[0], Sent)


def test_when_its_lease_has_run_out(two: Tier) -> None:
    stage = two.stages[0]
    stage.give(whole=two.layout)
    assert stage.closed == []
    told(two, stage, advance_s=1.0)
    assert isinstance(stage.left[0], Lapsed)
    assert stage.left[0].reason is Reason.DEADLINE


def test_when_the_receiver_gave_up_while_it_was_made(two: Tier) -> None:
    stage = two.stages[0]
    two.want()
    stage.offer()
    stage.made(UID, 0, 200)
    two.settle()
    two.port.receiver.give_up(UID)
    two.turn(lambda: bool(stage.left))
    two.settle()
    assert stage.closed == [], "its prompt is still being made"
    stage.made(UID, 200, 299)
    stage.finish(UID, windows_of(TOKENS, two.layout))
    told(two, stage)


def test_when_it_was_given_up_behind_its_end(two: Tier) -> None:
    stage = two.stages[0]
    two.want()
    two.settle()
    stage.give(whole=two.layout)
    stage.port.sender.give_up(UID)
    told(two, stage)


def test_not_when_it_was_given_up_before_its_end(two: Tier) -> None:
    """The stage knows, and closes the sequence."""
    stage = two.stages[0]
    two.want()
    stage.offer()
    stage.made(UID, 0, 200)
    stage.port.sender.give_up(UID)
    stage.close(UID)
    two.settle()
    assert stage.closed == []
    assert len(stage.port.sender) == 0
    stage.offload.check()


def test_when_its_port_is_closed_with_transfers_under_way() -> None:
    with tier("inprocess", "two wide") as made:
        stage = made.stages[1]
        made.want()
        made.settle()
        stage.offer()
        made.settle()
        stage.made(UID, 0, 200)
        stage.made(UID, 200, 299)
        stage.finish(UID, windows_of(TOKENS, made.layout))
        assert len(stage.port.sender._transfers._jobs) > 1
        stage.kill()
        assert stage.closed == [UID]
        assert stage.opened[UID].state == "preempted"


def test_the_pages_stay_until_the_stage_closes_them(two: Tier) -> None:
    """Whatever receivers do changes no pool."""
    free = [stage.free_count for stage in two.stages]
    two.want()
    two.give()
    held = [stage.free_count for stage in two.stages]
    two.turn(lambda: two.is_idle)
    assert [stage.free_count for stage in two.stages] == held
    for stage in two.stages:
        stage.close(UID)
        stage.offload.forget_prefixes()
    assert [stage.free_count for stage in two.stages] == free
