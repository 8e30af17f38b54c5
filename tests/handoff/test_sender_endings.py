"""How a handoff ends at its sender, and when the rows of its prompt are let go."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from ess.door.handoff.endings import Lapsed
from ess.door.handoff.outgoing import transfers, units
from ess.transfer.messages import Again, Count, PieceKind, Reason, Release
from tests.handoff.layout import LAYOUT
from tests.handoff.sending import LAYERS, PROMPT, UID, WANTED, landed, prompt_of, world

ROWS = PieceKind.ROWS


def test_without_a_receiver_the_lease_ends() -> None:
    with world(lease_s=7.0) as made:
        sequence = made.open(PROMPT)
        made.clock.advance(100.0)
        made.chunk(sequence, 0, 300)
        made.round()
        made.sender.finish(UID, None)
        made.clock.advance(6.9)
        made.round()
        assert not made.sender.outcomes()
        assert sequence.state == "preempted"
        made.clock.advance(0.2)
        made.round()
        (lapsed,) = made.sender.outcomes()
        assert isinstance(lapsed, Lapsed)
        assert lapsed.reason is Reason.DEADLINE
        assert "no receiver has asked" in lapsed.sentence
        marks = dict(lapsed.timeline.marks)
        assert (marks["made"], "reserved" in marks) == (100.0, False)
        assert sequence.state == "closed"
        assert len(made.sender) == 0
        assert made.latent.prefix.idle_count == 4, "its full pages stay as prefix cache"


def test_asking_again_and_again_does_not_keep_a_handoff() -> None:
    with world(lease_s=7.0) as made:
        made.receiver.reserve(PROMPT)
        sequence = made.whole(PROMPT)
        for _ in range(8):
            made.settle()
            made.receiver.say(Again(UID, ROWS, 0, LAYERS, 0, 5))
            made.clock.advance(1.0)
        made.settle()
        (lapsed,) = made.sender.outcomes()
        assert lapsed.reason is Reason.DEADLINE
        assert made.receiver.of(Release) == [Release(UID, Reason.DEADLINE)]
        assert sequence.state == "closed"


def test_a_slow_network_does_not_end_a_handoff_that_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(units, "PART_BYTES_MAX", LAYOUT.page_bytes)
    monkeypatch.setattr(transfers, "UNDERWAY_BYTES_MAX", 1)
    with world(lease_s=7.0) as made:
        made.receiver.reserve(PROMPT)
        made.whole(PROMPT)
        for _ in range(WANTED + 3):
            made.clock.advance(3.0)
            made.round()
        assert made.receiver.has_all()
        assert not made.sender.outcomes()
        landed(made)


@pytest.mark.parametrize("is_made", [False, True])
def test_a_receiver_that_gives_up_in_the_middle(is_made: bool) -> None:
    with world() as made:
        made.receiver.reserve(PROMPT)
        sequence = made.open(PROMPT)
        made.chunk(sequence, 0, 128)
        made.settle()
        if is_made:
            made.chunk(sequence, 128, 300)
            made.sender.finish(UID, None)
        made.receiver.say(Release(UID, Reason.ABORTED))
        made.settle()
        (lapsed,) = made.sender.outcomes()
        assert lapsed.reason is Reason.ABORTED
        assert not made.receiver.of(Release), "who gave it up is not told that it is over"
        if not is_made:
            before = len(made.receiver.pieces)
            made.chunk(sequence, 128, 300)
            made.settle()
            assert len(made.receiver.pieces) == before
            assert sequence.state == "active", "its engine still makes the prompt"
            made.sender.finish(UID, None)
        assert sequence.state == "closed"
        assert len(made.sender) == 0
        assert not made.sender.outcomes()


def test_a_done_before_the_prompt_is_made_is_not_believed() -> None:
    with world() as made:
        made.receiver.reserve(PROMPT)
        sequence = made.open(PROMPT)
        made.settle()
        made.done()
        made.settle()
        (lapsed,) = made.sender.outcomes()
        assert isinstance(lapsed, Lapsed)
        made.sender.give_up(UID)
        sequence.close()


def test_pages_under_way_keep_their_sequence() -> None:
    with world(lease_s=7.0) as made:
        made.receiver.reserve(PROMPT)
        made.settle()
        sequence = made.whole(PROMPT)
        made.sender.give_up(UID, Reason.ABORTED)
        assert len(made.sender.outcomes()) == 1
        assert sequence.state == "preempted", "its pages are being read"
        assert made.sender.is_underway(UID, peer=made.receiver.end.epoch)
        made.sender.check()
        made.settle()
        assert not made.sender.is_underway(UID, peer=made.receiver.end.epoch)
        assert sequence.state == "closed"
        assert made.receiver.of(Release) == [Release(UID, Reason.ABORTED)]
        assert len(made.sender) == 0


@pytest.mark.parametrize("kind", ["inprocess", "tcp"])
@pytest.mark.parametrize("is_made", [False, True])
def test_a_lost_peer_ends_its_handoffs(kind: str, is_made: bool) -> None:
    with world(kind) as made:
        made.receiver.reserve(PROMPT)
        made.receiver.reserve(prompt_of(65, 3), uid=5)
        made.until(lambda: len(made.sender._orphans) == 2)
        sequence = made.open(PROMPT)
        made.until(lambda: bool(made.receiver.of(Count)))
        if is_made:
            made.chunk(sequence, 0, 300)
            made.sender.finish(UID, None)
        else:
            made.chunk(sequence, 0, 128)
        made.receiver.end.close()
        made.receiver.poll = lambda: None
        ended: list = []
        made.until(lambda: bool(ended.extend(made.sender.outcomes()) or ended))
        assert isinstance(ended[0], Lapsed)
        assert "is lost" in ended[0].sentence
        assert not made.sender._orphans
        if not is_made:
            made.chunk(sequence, 128, 300)
            made.sender.finish(UID, None)
        made.until(lambda: not len(made.sender))
        assert sequence.state == "closed"
        assert not made.sender._transfers._jobs


def test_given_up_before_the_prompt_is_made_the_engine_keeps_its_sequence() -> None:
    with world() as made:
        made.receiver.reserve(PROMPT)
        sequence = made.open(PROMPT)
        made.chunk(sequence, 0, 128)
        made.sender.give_up(UID)
        made.sender.give_up(UID)
        made.sender.made(UID, 0, 192)
        made.settle()
        assert sequence.state == "active"
        assert len(made.sender.outcomes()) == 1
        assert len(made.sender) == 0
        sequence.close()


def test_close_gives_up_every_sequence() -> None:
    with world() as made:
        made.receiver.reserve(PROMPT)
        made.settle()
        first = made.whole(PROMPT)
        second = made.whole(prompt_of(80, 5), uid=5)
        made.end.close()
        made.sender.close()
        made.sender.check()
        assert first.state == second.state == "closed"
        assert len(made.sender) == 0


def test_an_offer_that_is_broken_off_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with world() as made:
        made.receiver.reserve(PROMPT)
        made.settle()
        sequence = made.offload.open(PROMPT)
        with monkeypatch.context() as patch:
            patch.setattr(transfers.Transfers, "go_on", Mock(side_effect=OSError))
            with pytest.raises(OSError):
                made.sender.offer(UID, sequence, prompt=PROMPT, salt=b"")
        assert made.sender.outcomes() == []
        assert made.port.counts.lapsed_count == 0
        sequence.close()
        made.settle()
        made.receiver.reserve(PROMPT)
        made.whole(PROMPT)
        landed(made)
        assert (made.port.counts.sent_count, made.port.counts.lapsed_count) == (1, 0)
