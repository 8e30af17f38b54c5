"""References to pages that are no longer what they were: four ways, no wrong row in any.

A prefill worker that pushes holds a reference to the decode worker's pages: a ticket and where they
lie. What goes wrong in such engines is a reference that is unknown, points elsewhere, is used
twice, or after the pages have a new owner. Shared memory is asked after the copy, NIXL never: there
the count and the checksum decide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from ess.transfer.arrivals import Arrivals, Share, Verdict
from ess.transfer.messages import Piece, PieceKind, checksum
from ess.transfer.runs import views
from ess.transfer.transport import Completed, Failed
from tests.support.manual_clock import ManualClock
from tests.transfer.rigs import POISON, Rig, pages, pump, require, rigged, write

UNIT = 656
ROOM, KEPT = 40, 24
SHARE = Share(kind=PieceKind.ROWS, layer_begin=0, layer_end=1, page_count=4, unit_bytes=UNIT)


class Push:
    """A prefill worker that writes four pages into the decode worker's, under a ticket."""

    def __init__(self, rig: Rig) -> None:
        self.prefill, self.decode, self.made, self.room = rig.pair(ROOM * UNIT)
        self.decode.allow(7)
        self.is_asked = rig.kind != "nixl"
        self.arrivals = Arrivals(clock=ManualClock())
        self.piece = Piece(7, PieceKind.ROWS, 0, 1, 0, 4, 4 * UNIT, 0)
        made = checksum(views(pages(range(4), UNIT), {1: self.made}))
        self.piece = replace(self.piece, checksum=made)
        self.arrivals.expect(uid=7, sender=self.prefill.epoch, shares=[SHARE], within_s=30)

    def send(self, *, ticket: int = 7, begin: int = 0) -> type | Verdict:
        """How the transfer failed, or what the receiver's count says to its bytes."""
        self.room.memory[:] = POISON
        wish = write(self.decode.epoch, range(4), range(begin, begin + 4), UNIT, ticket=ticket)
        self.prefill.post(wish)
        seen = pump([self.prefill, self.decode], lambda seen: bool(seen[0]))
        if isinstance(seen[0][0], Failed):
            assert not self.decode.guards or (self.room.memory == POISON).all()
            return Failed
        assert isinstance(seen[0][0], Completed)
        landed = views(pages(range(4), UNIT), {1: self.room})
        return self.arrivals.take(self.piece, sender=self.prefill.epoch, read=lambda _: landed)

    @property
    def is_complete(self) -> bool:
        handoff = self.arrivals.find(7, sender=self.prefill.epoch)
        return handoff is not None and handoff.is_complete


@pytest.fixture(params=["inprocess", "tcp", "shared", "nixl"])
def push(request: pytest.FixtureRequest) -> Iterator[Push]:
    require(request.param)
    with rigged(request.param) as rig:
        yield Push(rig)


def test_the_reference_as_it_was_given(push: Push) -> None:
    assert push.send() is Verdict.TAKEN
    assert push.is_complete
    assert np.array_equal(push.room.memory[: 4 * UNIT], push.made.memory[: 4 * UNIT])


def test_an_unknown_reference(push: Push) -> None:
    assert push.send(ticket=8) is (Failed if push.is_asked else Verdict.TAKEN)
    other = replace(push.piece, uid=8)
    verdict = push.arrivals.take(other, sender=push.prefill.epoch, read=lambda _: [])
    assert verdict is Verdict.UNKNOWN


def test_a_reference_outside_of_what_was_reserved(push: Push) -> None:
    assert push.send(begin=ROOM - 3) is Failed
    assert push.send(begin=KEPT) is Verdict.CORRUPT
    assert not push.is_complete


def test_a_reference_used_twice(push: Push) -> None:
    assert push.send() is Verdict.TAKEN
    assert push.send() is Verdict.DUPLICATE
    push.made.memory[: 4 * UNIT] ^= 0x55
    assert push.send() is Verdict.CORRUPT
    assert not push.is_complete, "the second transfer wrote over what the first had brought"


def test_pages_that_have_a_new_owner(push: Push) -> None:
    push.decode.forbid(7)
    push.arrivals.close(7, sender=push.prefill.epoch)
    push.decode.allow(9)
    assert push.send() is (Failed if push.is_asked else Verdict.UNKNOWN)
    assert not push.is_complete
