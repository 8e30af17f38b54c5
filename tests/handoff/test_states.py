"""What a request keeps beside its rows goes over as the last of it, whole, or nothing lands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from ess.door.handoff import geometry
from ess.door.handoff.endings import Landed, Missed
from ess.door.handoff.incoming.origins import Origins
from ess.door.handoff.outgoing import units
from ess.door.handoff.outgoing.departure import Departure
from ess.door.handoff.outgoing.packed import PLACES
from ess.door.handoff.outgoing.transfers import Transfers
from ess.door.handoff.outgoing.units import Part
from ess.errors import BadInput, PoolFull
from ess.layout import ModelLayout
from ess.transfer.members import Member
from ess.transfer.messages import Again, Piece, PieceKind, Reason, layout_hash
from ess.transfer.transport import Transport
from tests.handoff.layout import ENTRIES, LAYOUT, LINEAR, STATES
from tests.handoff.receiving import KINDS, UID, WAIT_S, Pair, content, fill, offload_of, paired
from tests.handoff.test_port import two

TOKENS = tuple(range(1102))
"""Of entries 275 rows and a token; five pages."""
SHORT = tuple(range(300))
STATE = PieceKind.STATE


def tokens_of(layout: ModelLayout) -> tuple[int, ...]:
    return TOKENS if layout is ENTRIES else SHORT


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with paired(request.param, TOKENS, ENTRIES) as made:
        yield made


@pytest.fixture(params=STATES)
def layout(request: pytest.FixtureRequest):
    return STATES[request.param]


def state_of(pair: Pair) -> bytes:
    """As the peer has it, as far as it is sent."""
    size = pair.peer.layout.request_state_bytes(len(pair.peer.sequence.tokens) - 1)
    return pair.peer.sequence.holding.state[:size].tobytes()


def beside(sequence, size: int) -> bytes:
    return sequence.beside.numpy()[:size].tobytes()


# ---- all is well


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_state_arrive_bit_for_bit(kind: str, layout) -> None:
    tokens = tokens_of(layout)
    with paired(kind, tokens, layout) as pair:
        sequence = pair.open(tokens)
        pair.peer.push_all(pair.expect(sequence))
        outcome = pair.finish()
        assert isinstance(outcome, Landed)
        assert content(sequence) == content(pair.peer.sequence)
        assert sequence.text_length == len(tokens) - 1
        sequence.resume()
        sent = state_of(pair)
        assert beside(sequence, len(sent)) == sent
        assert (sequence.beside[len(sent) :] == 0xFF).all()
        sequence.warm_from(*outcome.windows)
        sequence.close()
        pair.check()


@pytest.mark.parametrize("count", [1, 2, 4, 5, 256, 257, 258, 260, 261])
def test_prompts_of_any_length_land_whole(count: int, layout) -> None:
    tokens = tuple(range(count))
    with paired("inprocess", tokens, layout) as pair:
        sequence = pair.open(tokens)
        pair.peer.push_all(pair.expect(sequence))
        assert isinstance(pair.ended(), Landed)
        assert content(sequence) == content(pair.peer.sequence)
        assert (sequence.length, sequence.text_length) == (layout.rows_of(count - 1), count - 1)
        sequence.resume()
        assert beside(sequence, len(state_of(pair))) == state_of(pair)
        sequence.close()
        pair.check()


def test_with_cached_rows_the_state_comes_whole(pair: Pair) -> None:
    """Also where no state was kept at the end of what is cached."""
    with pair.offload.open(TOKENS[:600]) as before:
        fill(before, seed=len(TOKENS))
    pair.offload.owner.pools.states.kept.emptied()
    sequence = pair.open(TOKENS)
    assert sequence.cached_count == 512
    room = pair.expect(sequence)
    assert (room.first_page, len(room.pages)) == (2, 3)
    pair.peer.push_all(room)
    assert isinstance(pair.finish(), Landed)
    sequence.resume()
    assert beside(sequence, len(state_of(pair))) == state_of(pair)
    sequence.close()
    pair.check()


@pytest.mark.parametrize(("count", "cached"), [(1024, 0), (1025, 1024), (1026, 0)])
def test_a_state_at_the_end_of_a_page_is_kept_for_prompts_to_come(count: int, cached: int) -> None:
    tokens = TOKENS[:count]
    with paired("inprocess", tokens, ENTRIES) as pair:
        first = pair.open(tokens)
        pair.peer.push_all(pair.expect(first))
        assert isinstance(pair.ended(), Landed)
        first.close()
        with pair.offload.open([*tokens, 7, 8]) as second:
            assert second.cached_count == cached
            if cached:
                assert beside(second, len(state_of(pair))) == state_of(pair)


def test_what_has_landed_is_preempted_and_resumed_as_ever(pair: Pair) -> None:
    sequence = pair.open(TOKENS)
    pair.peer.push_all(pair.expect(sequence))
    assert isinstance(pair.finish(), Landed)
    for _ in range(2):
        sequence.resume()
        assert beside(sequence, len(state_of(pair))) == state_of(pair)
        sequence.preempt()
    sequence.close()
    pair.check()


# ---- it comes in part, twice, spoilt, late, or from others


def test_without_its_state_nothing_lands(pair: Pair) -> None:
    before = pair.free_count
    sequence = pair.open(TOKENS)
    room = pair.expect(sequence)
    pair.peer.push_pages(room)
    pair.peer.push_windows(room)
    pair.peer.push_state(room, range(2))
    pair.settle()
    pair.peer.release(Reason.DONE)
    outcome = pair.finish()
    assert isinstance(outcome, Missed)
    assert "28 of 29 pages of a layer had come" in outcome.sentence
    assert (sequence.length, sequence.holding.saved) == (0, None)
    sequence.close()
    assert pair.free_count == before
    assert len(pair.receiver) == 0
    pair.check()


def test_the_part_that_is_missing_is_asked_for(pair: Pair) -> None:
    sequence = pair.open(TOKENS)
    room = pair.expect(sequence)
    pair.peer.push_pages(room)
    pair.peer.push_windows(room)
    pair.peer.push_state(room, range(1))
    pair.peer.tell_count(29)
    pair.settle()
    pair.clock.advance(1)
    pair.turn(lambda: bool(pair.peer.of(Again)))
    assert pair.peer.of(Again) == [Again(UID, STATE, 0, 1, 1, 3)]
    pair.peer.serve(pair.peer.of(Again)[0])
    assert isinstance(pair.finish(), Landed)
    sequence.resume()
    assert beside(sequence, len(state_of(pair))) == state_of(pair)
    sequence.close()


def test_a_spoilt_part_does_not_count_whichever_copy_it_is(pair: Pair) -> None:
    """A worse second copy takes back what the first has brought."""
    memory = pair.peer.regions[geometry.PACKED].memory
    sequence = pair.open(TOKENS)
    room = pair.expect(sequence)
    pair.peer.push_state(room)
    pair.settle()
    pair.peer.push_state(room)
    pair.settle()
    assert pair.port.counts.refused_count == 0, "a copy like the first is none the worse"
    place = len(memory) - 1
    pair.peer.push_state(room, range(2, 3))
    memory[place] ^= 1
    pair.settle()
    memory[place] ^= 1
    assert pair.port.counts.refused_count == 1
    pair.peer.push_pages(room)
    pair.peer.push_windows(room)
    pair.peer.tell_count(29)
    pair.settle()
    assert pair.outcomes == []
    pair.clock.advance(1)
    pair.turn(lambda: bool(pair.peer.of(Again)))
    assert pair.peer.of(Again) == [Again(UID, STATE, 0, 1, 2, 3)]
    pair.peer.serve(pair.peer.of(Again)[0])
    assert isinstance(pair.finish(), Landed)
    sequence.resume()
    assert beside(sequence, len(state_of(pair))) == state_of(pair)
    sequence.close()


def wrong_pieces() -> list[Piece]:
    unit = geometry.STATE_UNIT_BYTES
    size = ENTRIES.request_state_bytes(len(TOKENS) - 1)
    return [
        Piece(UID, STATE, 0, 1, 0, 3, size - 1, 0),
        Piece(UID, STATE, 0, 1, 0, 3, 3 * unit, 0),
        Piece(UID, STATE, 0, 1, 2, 3, unit, 0),
        Piece(UID, STATE, 0, 1, 0, 4, size, 0),
        Piece(UID, STATE, 0, 2, 0, 1, 2 * unit, 0),
        Piece(UID, STATE, 1, 2, 0, 1, unit, 0),
    ]


def test_pieces_of_other_sizes_and_places_are_refused(pair: Pair) -> None:
    sequence = pair.open(TOKENS)
    room = pair.expect(sequence)
    for number, piece in enumerate(wrong_pieces(), start=1):
        pair.peer.say(piece)
        pair.turn(lambda number=number: pair.port.counts.refused_count == number)
    pair.peer.push_all(room)
    assert isinstance(pair.finish(), Landed)
    sequence.close()


def test_where_rows_are_all_no_state_is_taken() -> None:
    with paired("inprocess") as pair:
        room = pair.expect(pair.open(range(200)))
        pair.peer.say(Piece(UID, STATE, 0, 1, 0, 1, 100, 0))
        pair.turn(lambda: pair.port.counts.refused_count == 1)
        pair.peer.push_all(room)
        assert isinstance(pair.ended(), Landed)


def test_what_comes_late_spoils_nothing(pair: Pair) -> None:
    """Its place is another handoff's by then."""
    first = pair.open(TOKENS)
    old = pair.expect(first)
    pair.receiver.give_up(UID)
    first.close()
    if not pair.peer.transport.guards:
        pair.peer.release(Reason.SETTLED)
    pair.turn(lambda: len(pair.receiver) == 0)
    second = pair.open(TOKENS)
    room = pair.expect(second, uid=UID + 1)
    assert room.window_at == old.window_at
    refused = pair.port.counts.refused_count
    if pair.peer.transport.guards:
        pair.peer.push_state(old)
        pair.turn(lambda: pair.peer.failed_count == 1)
    else:
        pair.peer.say(Piece(UID, STATE, 0, 1, 0, 1, geometry.STATE_UNIT_BYTES, 0))
        pair.turn(lambda: pair.port.counts.refused_count == refused + 1)
    pair.peer.push_all(room)
    if not pair.peer.transport.guards:
        pair.turn(lambda: pair.receiver._entries[UID + 1].legs[0].ending is not None)
        pair.peer.release(Reason.SETTLED, uid=UID + 1)
    assert isinstance(pair.ended(), Landed)
    second.resume()
    assert beside(second, len(state_of(pair))) == state_of(pair)
    second.close()
    pair.check()


def test_a_state_from_a_stranger_is_refused() -> None:
    with paired("inprocess", TOKENS, ENTRIES) as pair:
        room = pair.expect(pair.open(TOKENS))
        stranger = pair.ends.end()
        metadata = pair.port.metadata()
        stranger.connect(metadata)
        pair.port.meet(stranger.metadata())
        ours = pair.peer.transport
        pair.peer.transport = stranger
        pair.peer.say(Piece(UID, STATE, 0, 1, 0, 1, geometry.STATE_UNIT_BYTES, 0))
        pair.peer.transport = ours
        pair.turn(lambda: bool(stranger.poll()) or pair.port.counts.refused_count == 1)
        pair.settle()
        assert pair.port.counts.refused_count == 1
        pair.peer.push_all(room)
        assert isinstance(pair.ended(), Landed)


def test_silence_in_the_middle_of_a_state_ends_it() -> None:
    with paired("inprocess", TOKENS, ENTRIES) as pair:
        before = pair.free_count
        sequence = pair.open(TOKENS)
        room = pair.expect(sequence)
        pair.peer.push_pages(room)
        pair.peer.push_state(room, range(2))
        pair.settle()
        pair.clock.advance(WAIT_S)
        outcome = pair.ended()
        assert isinstance(outcome, Missed)
        assert "nothing new for 30 s" in outcome.sentence
        sequence.close()
        assert pair.free_count == before
        pair.check()


# ---- two ports


def given(layout: ModelLayout) -> bytes:
    """The state of a prompt that `give` has made."""
    tokens = tokens_of(layout)
    sequence = offload_of(layout).open(list(tokens))
    fill(sequence, seed=tokens[0])
    return beside(sequence, layout.request_state_bytes(len(tokens) - 1))


@pytest.mark.parametrize("kind", [*KINDS, "shared"])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_state_goes_over_in_bounded_parts(
    kind: str, first: str, layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one unit here: no more of it is copied than what is under way."""
    monkeypatch.setattr(units, "PART_BYTES_MAX", geometry.STATE_UNIT_BYTES)
    with two(kind, layout=layout) as pair:
        tokens = tokens_of(layout)
        if first == "prefill":
            pair.prefill.give(7, tokens)
        opened = pair.decode.want(7, pair.prefill.port.epoch, tokens)
        if first == "decode":
            pair.turn(lambda: len(pair.prefill.port.sender._orphans) == 1)
            pair.prefill.give(7, tokens)
        pair.turn(lambda: bool(pair.decode.came and pair.prefill.left))
        (landed,) = pair.decode.came
        assert isinstance(landed, Landed)
        opened.resume()
        wanted = given(layout)
        assert beside(opened, len(wanted)) == wanted
        opened.close()
        pair.turn(lambda: not any(worker.port.is_busy for worker in pair.workers))
        sent, got = (worker.port.counts for worker in pair.workers)
        assert (sent.sent_bytes, got.again_count, got.refused_count) == (got.received_bytes, 0, 0)
        pair.check()


def test_a_state_leaves_after_rows_and_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[PieceKind] = []
    post = Transfers._post

    def noted(self: Transfers, departure: Departure, part: Part) -> bool:
        is_posted = post(self, departure, part)
        kinds.extend([part.kind] * is_posted)
        return is_posted

    monkeypatch.setattr(Transfers, "_post", noted)
    with two("inprocess", layout=ENTRIES) as pair:
        pair.prefill.give(7, TOKENS)
        pair.decode.want(7, pair.prefill.port.epoch, TOKENS)
        pair.turn(lambda: bool(pair.decode.came and pair.prefill.left))
    assert kinds == [PieceKind.ROWS, PieceKind.INDEX_KEYS, PieceKind.WINDOWS, STATE]


def test_a_handoff_has_one_place_to_leave_from_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A receiver that is not heard of again holds no more of them."""
    monkeypatch.setattr(units, "PART_BYTES_MAX", geometry.STATE_UNIT_BYTES)
    with two("inprocess", layout=ENTRIES) as pair:
        peer, sender = pair.prefill.port.epoch, pair.prefill.port.sender
        for uid in (1, 2):
            pair.decode.want(uid, peer, (uid, *TOKENS[1:]))
            pair.prefill.give(uid, (uid, *TOKENS[1:]))
        most = 0

        def has_come() -> bool:
            nonlocal most
            lent = PLACES - len(sender._transfers._packed._free)
            most = max(most, lent)
            return len(pair.decode.came) == len(pair.prefill.left) == 2

        pair.turn(has_come)
        assert most == 2
        assert [type(each) for each in pair.decode.came] == [Landed, Landed]


def test_the_sender_s_copy_goes_with_the_handoff() -> None:
    with two("inprocess", layout=ENTRIES) as pair:
        sequence = pair.prefill.give(7, TOKENS)
        assert sequence.holding.saved is not None
        pair.decode.want(7, pair.prefill.port.epoch, TOKENS)
        pair.turn(lambda: bool(pair.decode.came and pair.prefill.left))
        pair.turn(lambda: sequence.state == "closed")
        assert sequence.holding.saved is None


# ---- who may hand over to whom


@pytest.mark.parametrize(
    "other", [{"state_bytes": 150_002}, {"state_page_bytes": 9_001}, {"row_tokens": 8}]
)
def test_workers_with_other_states_have_another_layout(other: dict[str, int]) -> None:
    assert layout_hash(replace(ENTRIES, **other)) != layout_hash(ENTRIES)
    assert layout_hash(replace(ENTRIES, name="other")) == layout_hash(ENTRIES)


def test_several_workers_do_not_share_a_state() -> None:
    listed = [Member(1, b"", range(2)), Member(2, b"", range(2, 3))]
    with pytest.raises(BadInput, match="2 workers have layers each, and 't' keeps a state beside"):
        Origins(LINEAR).of(listed)
    assert len(Origins(LINEAR).of([Member(1, b"")])) == 1


def test_no_more_states_arrive_than_sequences_may_be_active() -> None:
    with paired("inprocess", TOKENS[:5], ENTRIES) as pair:
        opened = [pair.open([number, 1, 2]) for number in range(5)]
        for uid, sequence in enumerate(opened[:4]):
            pair.expect(sequence, uid=uid)
        peer: Transport = pair.peer.transport
        with pytest.raises(PoolFull, match=r"all 4 handoffs .* under way; raise sequence_max"):
            pair.receiver.expect(opened[4], uid=9, peer=peer.epoch)
        for uid in range(4):
            pair.receiver.give_up(uid)
        for sequence in opened:
            sequence.close()


def test_a_slot_has_room_for_windows_and_state() -> None:
    for layout in (LAYOUT, ENTRIES, LINEAR):
        size = geometry.slot_bytes(layout, 2048)
        windows = geometry.window_bytes(layout, layout.group_count, 2048)
        assert windows + layout.request_state_bytes(2048) <= size
        assert size % geometry.SLOT_ALIGN == 0
    spans = [geometry.state_span(ENTRIES, 1101, range(n, n + 1)) for n in range(3)]
    assert np.diff([[span.start, span.stop] for span in spans]).reshape(-1).tolist() == [
        65_536,
        65_536,
        ENTRIES.request_state_bytes(1101) - 2 * 65_536,
    ]


def test_a_landed_state_stays_where_it_came_until_it_is_on_the_device() -> None:
    """Its slot is another handoff's only then; a sequence that is closed gives it back too."""
    with paired("inprocess", TOKENS, ENTRIES) as pair:
        slots = set()
        for uid, ends in ((UID, "resumed"), (UID + 1, "closed")):
            sequence = pair.open(TOKENS)
            room = pair.expect(sequence, uid=uid)
            pair.peer.push_all(room)
            assert isinstance(pair.ended(), Landed)
            assert len(pair.receiver) == 0
            assert len(pair.receiver._free_slots) == 3
            pair.check()
            if ends == "resumed":
                sequence.resume()
                assert beside(sequence, len(state_of(pair))) == state_of(pair)
            sequence.close()
            assert len(pair.receiver._free_slots) == 4
            pair.check()
            slots.add(room.window_at)
        assert len(slots) == 1
