"""What lands is what left, bit for bit, or nothing lands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ess.door.handoff.endings import Landed, Missed
from ess.layout import RowCodec
from ess.transfer.messages import (
    Again,
    Piece,
    PieceKind,
    Reason,
    Refused,
    Release,
    Reserved,
    text_digest,
)
from tests.handoff.layout import LAYOUT
from tests.handoff.receiving import (
    TOKENS,
    UID,
    WANTED,
    Pair,
    content,
    paired,
)

# ---- all is well


def test_rows_and_keys_arrive_bit_for_bit(pair: Pair) -> None:
    sequence = pair.open(TOKENS)
    room = pair.expect(sequence)
    assert room.text == text_digest(range(199), b"")
    assert (room.token_count, room.first_page, len(room.pages)) == (199, 0, 4)
    pair.peer.push_all(room)
    outcome = pair.finish()
    assert isinstance(outcome, Landed)
    assert [name for name, _ in outcome.timeline.marks] == ["first piece", "complete", "landed"]
    assert content(sequence) == content(pair.peer.sequence)
    assert (sequence.state, sequence.length) == ("preempted", 199)
    pair.check()
    sequence.resume()
    sequence.warm_from(*outcome.windows)
    sequence.fill()
    assert [pair.offload.verify(layer) for layer in range(4)] == [[]] * 4
    pair.offload.begin([sequence], query_counts=[1]).abandon()
    pair.check()


def test_what_came_behind_the_prompt_is_poison_again(pair: Pair) -> None:
    latent = pair.peer.pools.latent
    behind = pair.peer.sequence.holding.host_rows(199, 57)
    latent.rows[:, behind] = 7
    sequence = pair.open(TOKENS)
    pair.peer.push_all(pair.expect(sequence))
    assert isinstance(pair.finish(), Landed)
    rows = sequence.holding.host_rows(199, 57)
    mine = pair.offload._pools.latent
    assert (mine.rows[:, rows] == 0xFF).all()
    assert all((mine.keys.read(layer, rows) == 0xFF).all() for layer in range(3))


def test_what_is_cached_is_not_asked_for_and_not_touched(pair: Pair) -> None:
    first = pair.open(TOKENS)
    pair.peer.push_all(pair.expect(first))
    assert isinstance(pair.finish(), Landed)
    first.close()
    sequence = pair.open(TOKENS)
    assert sequence.cached_count == 128, "of three full pages one is made anew, with MTP"
    room = pair.expect(sequence, uid=UID + 1)
    assert (room.first_page, len(room.pages)) == (2, 2)
    pair.peer.heard.clear()
    pair.peer.push_all(room)
    if not pair.peer.transport.guards:
        pair.turn(lambda: bool(pair.peer.of(Release)))
        pair.peer.release(Reason.SETTLED, uid=UID + 1)
    assert isinstance(pair.ended(), Landed)
    assert content(sequence) == content(pair.peer.sequence)
    assert pair.port.counts.received_bytes < 2 * 12 * LAYOUT.host_page_bytes
    pair.check()


def test_a_piece_of_a_cached_page_is_refused(guarded: Pair) -> None:
    first = guarded.open(TOKENS)
    guarded.peer.push_all(guarded.expect(first))
    guarded.ended()
    room = guarded.expect(guarded.open(TOKENS), uid=UID + 1)
    piece = Piece(UID + 1, PieceKind.ROWS, 0, 1, 1, 2, LAYOUT.page_bytes, 0)
    refused = guarded.port.counts.refused_count
    guarded.peer.say(piece)
    guarded.turn(lambda: guarded.port.counts.refused_count > refused)
    guarded.peer.push_all(room)
    assert isinstance(guarded.ended(), Landed)


@pytest.mark.parametrize("token_count", [1, 2, 64, 65, 129])
def test_prompts_of_any_length(token_count: int) -> None:
    with paired("inprocess", tokens=tuple(range(token_count))) as pair:
        sequence = pair.open(range(token_count))
        pair.peer.push_all(pair.expect(sequence))
        assert isinstance(pair.ended(), Landed)
        assert content(sequence) == content(pair.peer.sequence)
        assert sequence.length == token_count - 1
        pair.check()


def test_many_land_at_once_in_any_order(pair: Pair) -> None:
    sequences = {uid: pair.open(TOKENS) for uid in range(1, 5)}
    rooms = [pair.expect(sequence, uid=uid) for uid, sequence in sequences.items()]
    pages = [page for room in rooms for page in room.pages]
    assert len(set(pages)) == len(pages) == 16
    for room in reversed(rooms):
        pair.peer.push_pages(room)
    for room in rooms:
        pair.peer.push_windows(room)
        pair.settle()
        pair.peer.release(Reason.SETTLED, uid=room.uid)
    pair.turn(lambda: len(pair.outcomes) == 4)
    assert all(isinstance(outcome, Landed) for outcome in pair.outcomes)
    for sequence in sequences.values():
        assert content(sequence) == content(pair.peer.sequence)
        sequence.close()
    pair.check()


# ---- pieces are lost, late, doubled, corrupt


def test_a_done_that_is_said_changes_nothing(guarded: Pair) -> None:
    room = guarded.expect(guarded.open(TOKENS))
    guarded.peer.push_pages(room)
    guarded.peer.tell_count(WANTED)
    guarded.settle()
    assert guarded.outcomes == []
    guarded.peer.release(Reason.DONE)
    outcome = guarded.ended()
    assert isinstance(outcome, Missed)
    assert f"given up (done) from peer {guarded.peer.transport.epoch:016x}" in outcome.sentence
    assert "28 of 29 pages" in outcome.sentence
    guarded.check()


def test_what_was_lost_is_asked_for_and_nothing_else(pair: Pair) -> None:
    sequence = pair.open(TOKENS)
    room = pair.expect(sequence)
    for layer in (0, 1, 3):
        pair.peer.push(PieceKind.ROWS, range(layer, layer + 1), range(4), room)
    pair.peer.push(PieceKind.ROWS, range(2, 3), range(2), room)
    pair.peer.push(PieceKind.INDEX_KEYS, range(1, 3), range(4), room)
    pair.peer.push_windows(room)
    pair.peer.tell_count(WANTED)
    pair.settle()
    assert pair.peer.of(Again) == []
    pair.clock.advance(1)
    pair.turn(lambda: len(pair.peer.of(Again)) == 2)
    agains = pair.peer.of(Again)
    assert agains == [
        Again(UID, PieceKind.ROWS, 2, 3, 2, 4),
        Again(UID, PieceKind.INDEX_KEYS, 0, 1, 0, 4),
    ]
    for again in agains:
        pair.peer.serve(again)
    assert isinstance(pair.finish(), Landed)
    assert content(sequence) == content(pair.peer.sequence)


def test_what_was_not_posted_is_not_asked_for_at_once(pair: Pair) -> None:
    room = pair.expect(pair.open(TOKENS))
    pair.peer.push(PieceKind.ROWS, range(1), range(4), room)
    pair.settle()
    for _ in range(3):
        pair.peer.tell_count(4)
        pair.settle()
        pair.clock.advance(1)
        pair.settle()
    assert pair.peer.of(Again) == []


def test_a_room_that_was_not_heard_of_is_named_again(guarded: Pair) -> None:
    guarded.expect(guarded.open(TOKENS))
    guarded.clock.advance(1)
    guarded.turn(lambda: len(guarded.peer.of(Reserved)) == 2)
    guarded.clock.advance(1)
    guarded.settle()
    assert len(guarded.peer.of(Reserved)) == 2
    guarded.peer.tell_count(0)
    guarded.settle()
    guarded.clock.advance(3)
    guarded.settle()
    first, second = guarded.peer.of(Reserved)
    assert first == second


def test_a_full_peer_is_asked_again_when_it_said(pair: Pair) -> None:
    pair.expect(pair.open(TOKENS))
    pair.peer.say(Refused(UID, Reason.FULL, 4_000))
    pair.settle()
    pair.clock.advance(3.9)
    pair.settle()
    assert len(pair.peer.of(Reserved)) == 1
    pair.clock.advance(0.1)
    pair.turn(lambda: len(pair.peer.of(Reserved)) == 2)


def test_a_corrupt_piece_is_asked_for_again(pair: Pair) -> None:
    sequence = pair.open(TOKENS)
    room = pair.expect(sequence)
    there = pair.peer.pools.latent.rows
    row = int(pair.peer.sequence.holding.host_rows(70, 1)[0])
    pair.peer.push_pages(room)
    there[1, row, 3] ^= 1
    pair.settle()
    there[1, row, 3] ^= 1
    pair.peer.push_windows(room)
    pair.peer.tell_count(WANTED)
    pair.settle()
    assert pair.port.counts.refused_count == 1
    pair.clock.advance(1)
    pair.turn(lambda: bool(pair.peer.of(Again)))
    assert pair.peer.of(Again) == [Again(UID, PieceKind.ROWS, 1, 2, 0, 4)]
    pair.peer.serve(pair.peer.of(Again)[0])
    assert isinstance(pair.finish(), Landed)
    assert content(sequence) == content(pair.peer.sequence)


def test_a_second_copy_that_has_come_in_part_is_waited_for() -> None:
    """Over TCP: all is there and checked when half of a worse copy has gone over it."""
    layout = replace(LAYOUT, row=RowCodec(form="opaque", opaque_bytes=16_384))
    with paired("tcp", layout=layout) as pair:
        sequence = pair.open(TOKENS)
        room = pair.expect(sequence)
        pair.peer.push_pages(room)
        pair.turn(lambda: pair.port.counts.received_bytes >= 16 * layout.page_bytes)
        pair.settle()
        rows, row = pair.peer.pools.latent.rows, int(pair.peer.sequence.holding.host_rows(0, 1)[0])
        pair.peer.push_windows(room)
        pair.peer.push(PieceKind.ROWS, range(4), range(4), room)
        rows[0, row, 0] ^= 1
        pair.peer.poll()
        is_landing = pair.port._transport.is_landing
        pair.turn(lambda: is_landing(room.ticket) or bool(pair.outcomes), polls=False)
        assert pair.outcomes == []
        (leg,) = pair.receiver._entries[UID].legs
        assert leg.arrival.is_complete
        there = pair.offload._pools.latent.rows[0, int(sequence.holding.host_rows(0, 1)[0]), 0]
        assert there == rows[0, row, 0], "the worse copy has begun to land"
        pair.turn(lambda: not leg.arrival.is_complete)
        assert pair.outcomes == []
        rows[0, row, 0] ^= 1
        pair.peer.push(PieceKind.ROWS, range(4), range(4), room)
        assert isinstance(pair.ended(), Landed)
        assert content(sequence) == content(pair.peer.sequence)


def test_windows_that_are_none_land_nothing(pair: Pair) -> None:
    before = pair.free_count
    sequence = pair.open(TOKENS)
    room = pair.expect(sequence)
    pair.peer.push_pages(room)
    pair.peer.push_windows(room, packed=b"\0" * 40)
    outcome = pair.finish()
    assert isinstance(outcome, Missed)
    assert "all rows came, but windows that begin" in outcome.sentence
    assert sequence.length == 0
    sequence.close()
    assert pair.free_count == before
    pair.check()
