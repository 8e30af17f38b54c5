"""A handoff that is not to be: refused, silent, given up, its peer lost; and what is none."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from ess.door.handoff.endings import Landed, Missed
from ess.errors import BadInput, BadState, PoolFull
from ess.transfer.messages import (
    Count,
    Piece,
    PieceKind,
    Reason,
    Refused,
    Release,
    Reserved,
)
from ess.transfer.transport import Transfer
from tests.handoff.layout import LAYOUT
from tests.handoff.receiving import (
    TOKENS,
    UID,
    WAIT_S,
    Pair,
    content,
    fill,
    paired,
)

# ---- it is not to be


def test_a_refusal_is_told_in_words(pair: Pair) -> None:
    sequence = pair.open(TOKENS)
    pair.expect(sequence)
    pair.peer.say(Refused(UID, Reason.WRONG_TEXT, 0))
    outcome = pair.ended()
    assert isinstance(outcome, Missed)
    assert outcome.sentence.endswith("refuses it: wrong text")
    fill(sequence, seed=1)
    sequence.resume()
    pair.check()


def test_silence_ends_it_and_signs_of_life_do_not(guarded: Pair) -> None:
    room = guarded.expect(guarded.open(TOKENS))
    for _ in range(3):
        guarded.clock.advance(2)
        guarded.settle()
    guarded.peer.tell_count(0)
    guarded.settle()
    live_for(guarded, int(WAIT_S) - 1)
    assert guarded.outcomes == []
    guarded.peer.push(PieceKind.ROWS, range(1), range(4), room)
    guarded.settle()
    live_for(guarded, int(WAIT_S) - 1)
    assert guarded.outcomes == []
    guarded.peer.push(PieceKind.ROWS, range(1), range(4), room)
    guarded.settle()
    live_for(guarded, 1)
    outcome = guarded.ended()
    assert isinstance(outcome, Missed)
    assert "nothing new for 30 s" in outcome.sentence
    assert "4 of 29 pages of a layer had come" in outcome.sentence
    guarded.turn(lambda: Release(UID, Reason.DEADLINE) in guarded.peer.heard)
    guarded.check()


def live_for(pair: Pair, seconds: int) -> None:
    """Time passes in which both transports are looked after."""
    for _ in range(seconds):
        pair.clock.advance(1)
        pair.settle()


def test_a_peer_lost_in_the_middle_ends_it(pair: Pair) -> None:
    before = pair.free_count
    sequence = pair.open(TOKENS)
    room = pair.expect(sequence)
    pair.peer.push(PieceKind.ROWS, range(2), range(4), room)
    pair.settle()
    pair.peer.transport.close()
    pair.turn(lambda: bool(pair.outcomes), polls=False)
    (outcome,) = pair.outcomes
    assert isinstance(outcome, Missed)
    assert f"peer {pair.peer.transport.epoch:016x} is lost" in outcome.sentence
    assert pair.port.peers() == []
    sequence.close()
    assert pair.free_count == before
    with pytest.raises(BadInput, match="is not connected"):
        pair.receiver.expect(pair.open(TOKENS), uid=5, peer=pair.peer.transport.epoch)
    pair.check()


def test_given_up_in_the_middle_its_pages_serve_others_at_once(guarded: Pair) -> None:
    before = guarded.free_count
    sequence = guarded.open(TOKENS)
    room = guarded.expect(sequence)
    guarded.peer.push(PieceKind.ROWS, range(1), range(4), room)
    guarded.settle()
    guarded.receiver.give_up(UID)
    sequence.close()
    assert guarded.free_count == before
    other = guarded.offload.open([token + 7 for token in TOKENS])
    assert set(other.holding.host_pages.tolist()) & set(room.pages)
    fill(other, seed=3)
    expected = content(other)
    guarded.peer.push_all(room)
    guarded.turn(lambda: guarded.peer.failed_count == 6)
    assert content(other) == expected
    assert guarded.outcomes == []
    guarded.turn(lambda: Release(UID, Reason.ABORTED) in guarded.peer.heard)
    guarded.receiver.give_up(UID)
    guarded.check()


def test_given_up_once_it_has_landed_it_has_no_outcome(guarded: Pair, monkeypatch) -> None:
    """The engine gives it up before it has asked for outcomes."""
    sequence = guarded.open(TOKENS)
    guarded.peer.push_all(guarded.expect(sequence))
    with monkeypatch.context() as late:
        late.setattr(guarded.receiver, "outcomes", list)
        guarded.turn(lambda: len(guarded.receiver) == 0)
    guarded.receiver.give_up(UID)
    sequence.close()
    assert guarded.receiver.outcomes() == []
    guarded.check()


def test_what_is_late_for_a_former_room_of_the_uid_lands_nowhere(guarded: Pair) -> None:
    sequence = guarded.open(TOKENS)
    former = guarded.expect(sequence)
    guarded.peer.push_all(former)
    guarded.receiver.give_up(UID)
    sequence.close()
    other = guarded.offload.open([token + 7 for token in TOKENS])
    fill(other, seed=3)
    expected = content(other)
    sequence = guarded.open(TOKENS)
    guarded.receiver.expect(sequence, uid=UID, peer=guarded.peer.transport.epoch)
    guarded.turn(lambda: guarded.peer.failed_count == 6 and len(guarded.peer.of(Reserved)) == 2)
    assert content(other) == expected
    room = guarded.peer.room
    assert not set(room.pages) & set(former.pages)
    guarded.peer.push_all(room)
    assert isinstance(guarded.ended(), Landed)
    assert content(sequence) == content(guarded.peer.sequence)
    guarded.check()


def test_unguarded_pages_rest_until_the_peer_has_settled(unguarded: Pair) -> None:
    before = unguarded.free_count
    sequence = unguarded.open(TOKENS)
    room = unguarded.expect(sequence)
    unguarded.receiver.give_up(UID)
    sequence.close()
    assert unguarded.free_count == before - 4
    other = unguarded.offload.open([token + 7 for token in TOKENS])
    assert not set(other.holding.host_pages.tolist()) & set(room.pages)
    fill(other, seed=3)
    expected = content(other)
    unguarded.peer.push_all(room)
    unguarded.settle()
    for _ in range(3):
        unguarded.clock.advance(2)
        unguarded.settle()
    assert unguarded.peer.of(Release).count(Release(UID, Reason.ABORTED)) >= 2
    unguarded.peer.release(Reason.ABORTED)
    unguarded.settle()
    assert unguarded.free_count == before - 8, "a Release that is no answer frees nothing"
    unguarded.check()
    unguarded.peer.release(Reason.SETTLED)
    unguarded.turn(lambda: unguarded.free_count == before - 4)
    assert content(other) == expected
    latent = unguarded.offload._pools.latent
    for page in room.pages:
        assert (latent.rows[:, page * 64 : (page + 1) * 64] == 0xFF).all()
    assert unguarded.outcomes == []
    unguarded.check()


def test_unguarded_pages_rest_until_the_peer_is_lost(unguarded: Pair) -> None:
    before = unguarded.free_count
    sequence = unguarded.open(TOKENS)
    unguarded.expect(sequence)
    unguarded.receiver.give_up(UID)
    sequence.close()
    unguarded.settle()
    assert unguarded.free_count == before - 4, "pages are free while the peer may send"
    unguarded.peer.transport.close()
    unguarded.turn(lambda: unguarded.free_count == before, polls=False)
    unguarded.check()


def test_unguarded_nothing_is_told_before_the_pages_are_safe(unguarded: Pair) -> None:
    room = unguarded.expect(unguarded.open(TOKENS))
    unguarded.peer.push_all(room)
    unguarded.turn(lambda: Release(UID, Reason.DONE) in unguarded.peer.heard)
    assert unguarded.outcomes == []
    unguarded.peer.push(PieceKind.ROWS, range(1), range(4), room)
    row = int(unguarded.peer.sequence.holding.host_rows(9, 1)[0])
    unguarded.peer.pools.latent.rows[0, row, 0] ^= 1
    unguarded.settle()
    assert unguarded.outcomes == []
    unguarded.peer.release(Reason.SETTLED)
    outcome = unguarded.ended()
    assert isinstance(outcome, Missed)
    assert "a late copy" in outcome.sentence
    unguarded.check()


def test_a_sequence_closed_without_a_word_lands_nowhere(pair: Pair) -> None:
    before = pair.free_count
    sequence = pair.open(TOKENS)
    room = pair.expect(sequence)
    sequence.close()
    assert pair.free_count == before - 4
    pair.check()
    pair.peer.push_all(room)
    outcome = pair.finish()
    assert isinstance(outcome, Missed)
    assert "is closed, not preempted" in outcome.sentence
    assert pair.free_count == before
    pair.check()


def test_closing_the_port_ends_all(pair: Pair) -> None:
    before = pair.free_count
    sequence = pair.open(TOKENS)
    pair.expect(sequence)
    pair.port.close()
    (outcome,) = pair.receiver.outcomes()
    assert outcome.sentence == "the port was closed"
    sequence.close()
    assert pair.free_count == before
    pair.check()


# ---- what is refused


def test_a_uid_is_used_once_at_a_time(pair: Pair) -> None:
    pair.expect(pair.open(TOKENS))
    before = pair.free_count
    sequence = pair.open(TOKENS)
    with pytest.raises(BadInput, match="handoff 77 is under way already"):
        pair.receiver.expect(sequence, uid=UID, peer=pair.peer.transport.epoch)
    sequence.close()
    assert pair.free_count == before
    pair.check()


def test_more_than_the_slots_for_windows_are_refused() -> None:
    with paired("inprocess", arrivals_max=2) as pair:
        epoch = pair.peer.transport.epoch
        for uid in (1, 2):
            pair.expect(pair.open(TOKENS), uid=uid)
        third = pair.open(TOKENS)
        with pytest.raises(PoolFull, match="all 2 handoffs that may arrive") as full:
            pair.receiver.expect(third, uid=3, peer=epoch)
        assert (full.value.limiter, full.value.permanent) == ("handoffs", False)
        pair.receiver.give_up(1)
        room = pair.expect(third, uid=3)
        pair.peer.push_all(room)
        assert isinstance(pair.ended(), Landed)
        pair.check()


def test_only_a_fresh_sequence_on_the_host_may_land(guarded: Pair) -> None:
    epoch = guarded.peer.transport.epoch
    active = guarded.offload.open(list(TOKENS))
    with pytest.raises(BadState, match="active, not preempted"):
        guarded.receiver.expect(active, uid=UID, peer=epoch)
    fill(active, seed=2)
    active.preempt()
    with pytest.raises(BadInput, match="has rows that were not cached"):
        guarded.receiver.expect(active, uid=UID, peer=epoch)
    with pytest.raises(BadInput, match="was not opened by this offload"):
        guarded.receiver.expect(guarded.peer.sequence, uid=UID, peer=epoch)
    fresh = guarded.open(TOKENS)
    for uid in (-1, 1 << 63):
        with pytest.raises(BadInput, match=f"uid is {uid}"):
            guarded.receiver.expect(fresh, uid=uid, peer=epoch)
    assert guarded.port.counts.missed_count == 0, "of these, none was a handoff"
    with pytest.raises(BadInput, match="peer 0000000000000005 is not connected"):
        guarded.receiver.expect(fresh, uid=UID, peer=5)
    assert (len(guarded.receiver), guarded.port.counts.missed_count) == (0, 1)
    guarded.check()


def test_a_stranger_among_the_peers_moves_nothing(guarded: Pair) -> None:
    room = guarded.expect(guarded.open(TOKENS))
    for message in (
        Release(UID, Reason.ABORTED),
        Refused(UID, Reason.WRONG_TEXT, 0),
        Piece(UID, PieceKind.ROWS, 0, 1, 0, 4, 4 * LAYOUT.page_bytes, 0),
        Count(UID, 0, 1),
    ):
        guarded.receiver.take(message, peer=5)
    guarded.receiver.peer_lost(5, "it was killed")
    guarded.peer.say(Release(UID, Reason.ABORTED), sender=5)
    guarded.peer.transport.post(
        Transfer(peer=guarded.peer.peer, notification=b"no frame", within_s=WAIT_S)
    )
    guarded.turn(lambda: guarded.port.counts.refused_count == 3)
    assert guarded.outcomes == []
    guarded.peer.push_all(room)
    assert isinstance(guarded.ended(), Landed)


def test_a_count_of_a_handoff_that_is_none_is_answered(pair: Pair) -> None:
    pair.peer.tell_count(0, uid=123)
    pair.turn(lambda: Release(123, Reason.UNKNOWN) in pair.peer.heard)
    assert len(pair.receiver) == 0


def test_a_count_that_comes_before_its_handoff_begins_does_not_end_it(guarded: Pair) -> None:
    guarded.receiver.take(Count(UID, 0, 1), peer=guarded.peer.transport.epoch)
    room = guarded.expect(guarded.open(TOKENS))
    guarded.settle()
    assert guarded.peer.of(Release) == []
    guarded.peer.push_all(room)
    assert isinstance(guarded.ended(), Landed)


def test_unknown_uids_cost_no_memory(guarded: Pair) -> None:
    guarded.expect(guarded.open(TOKENS))
    epoch, receiver = guarded.peer.transport.epoch, guarded.receiver
    piece = Piece(1, PieceKind.ROWS, 0, 1, 0, 4, 4 * LAYOUT.page_bytes, 0)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for uid in range(1_000, 21_000):
        receiver.take(replace(piece, uid=uid), peer=epoch)
        receiver.take(Count(uid, 0, 1), peer=epoch)
        receiver.take(Refused(uid, Reason.FULL, 0), peer=epoch)
        receiver.take(Release(uid, Reason.ABORTED), peer=epoch)
    grown = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert grown < 128 << 10
    assert len(receiver) == 1
    receiver.check()
    guarded.turn(lambda: len(guarded.peer.of(Release)) == 256)
