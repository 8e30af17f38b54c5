"""References to rows that are no longer what they were: five ways, no wrong row in any.

A decode worker that pulls holds a reference to the prefill worker's pages: a ticket and where they
lie. What goes wrong in such engines is a reference that is unknown, points elsewhere, is used
twice, after the pages have a new owner, or after its lease. Shared memory is asked after the copy,
NIXL never: there the count and the checksum decide.
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
LENT, KEPT = 40, 24
SHARE = Share(kind=PieceKind.ROWS, layer_begin=0, layer_end=1, page_count=4, unit_bytes=UNIT)


class Pull:
    """A decode worker that fetches four pages of the prefill worker's, under a ticket."""

    def __init__(self, rig: Rig) -> None:
        self.prefill, self.decode, self.lent, self.pulled = rig.pair(LENT * UNIT)
        self.prefill.allow(7)
        self.is_asked = rig.kind != "nixl"
        self.arrivals = Arrivals(clock=ManualClock())
        self.piece = Piece(7, PieceKind.ROWS, 0, 1, 0, 4, 4 * UNIT, 0)
        made = checksum(views(pages(range(4), UNIT), {1: self.lent}))
        self.piece = replace(self.piece, checksum=made)
        self.arrivals.expect(uid=7, sender=self.prefill.epoch, shares=[SHARE], within_s=30)

    def fetch(self, *, ticket: int = 7, begin: int = 0) -> type | Verdict:
        """How the transfer failed, or what the receiver's count says to its bytes."""
        self.pulled.memory[:] = POISON
        wish = write(self.prefill.epoch, range(4), range(begin, begin + 4), UNIT, ticket=ticket)
        self.decode.post(replace(wish, op="read"))
        seen = pump([self.decode, self.prefill], lambda seen: bool(seen[0]))
        if isinstance(seen[0][0], Failed):
            assert not self.prefill.guards or (self.pulled.memory == POISON).all()
            return Failed
        assert isinstance(seen[0][0], Completed)
        local = views(pages(range(4), UNIT), {1: self.pulled})
        return self.arrivals.take(self.piece, sender=self.prefill.epoch, read=lambda _: local)

    @property
    def is_complete(self) -> bool:
        handoff = self.arrivals.find(7, sender=self.prefill.epoch)
        return handoff is not None and handoff.is_complete


@pytest.fixture(params=["inprocess", "tcp", "shared", "nixl"])
def pull(request: pytest.FixtureRequest) -> Iterator[Pull]:
    require(request.param)
    with rigged(request.param) as rig:
        yield Pull(rig)


def test_the_reference_as_it_was_given(pull: Pull) -> None:
    assert pull.fetch() is Verdict.TAKEN
    assert pull.is_complete
    assert np.array_equal(pull.pulled.memory[: 4 * UNIT], pull.lent.memory[: 4 * UNIT])


def test_an_unknown_reference(pull: Pull) -> None:
    unknown = pull.fetch(ticket=8)
    assert unknown is (Failed if pull.is_asked else Verdict.TAKEN)
    other = replace(pull.piece, uid=8)
    verdict = pull.arrivals.take(other, sender=pull.prefill.epoch, read=lambda _: [])
    assert verdict is Verdict.UNKNOWN


def test_a_reference_outside_of_what_was_lent(pull: Pull) -> None:
    assert pull.fetch(begin=LENT - 3) is Failed
    assert pull.fetch(begin=KEPT) is Verdict.CORRUPT
    assert not pull.is_complete


def test_a_reference_used_twice(pull: Pull) -> None:
    assert pull.fetch() is Verdict.TAKEN
    assert pull.fetch() is Verdict.DUPLICATE
    pull.lent.memory[: 4 * UNIT] ^= 0x55
    assert pull.fetch() is Verdict.CORRUPT
    assert not pull.is_complete, "the second fetch wrote over what the first had brought"


def test_pages_that_have_a_new_owner(pull: Pull) -> None:
    pull.prefill.forbid(7)
    pull.lent.memory[: 4 * UNIT] ^= 0x55
    pull.prefill.allow(9)
    assert pull.fetch() is (Failed if pull.is_asked else Verdict.CORRUPT)
    assert not pull.is_complete


def test_a_lease_that_has_ended(pull: Pull) -> None:
    pull.prefill.forbid(7)
    assert pull.fetch() is (Failed if pull.is_asked else Verdict.TAKEN)
    if not pull.is_asked:
        assert np.array_equal(pull.pulled.memory[: 4 * UNIT], pull.lent.memory[: 4 * UNIT])
