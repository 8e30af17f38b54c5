"""Pages leave when they are made and reserved for, whole, once, and only to their receiver."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from ess.door.handoff.outgoing import sender, transfers, units
from ess.door.handoff.outgoing.orphans import ORPHANS_MAX
from ess.door.handoff.outgoing.packed import PLACES
from ess.errors import BadInput, PoolFull
from ess.transfer.messages import (
    Again,
    Count,
    PieceKind,
    Reason,
    Refused,
    Release,
    Reserved,
)
from ess.transfer.transports.faulty import Fault
from tests.handoff.layout import LAYOUT
from tests.handoff.sending import (
    KEY_LAYERS,
    LAYERS,
    PROMPT,
    UID,
    WANTED,
    landed,
    prompt_of,
    world,
)

ROWS, KEYS, WINDOWS = PieceKind.ROWS, PieceKind.INDEX_KEYS, PieceKind.WINDOWS


@pytest.mark.parametrize("kind", ["inprocess", "tcp"])
@pytest.mark.parametrize("moment", ["before", "half", "whole"])
def test_the_receiver_may_come_at_any_time(kind: str, moment: str) -> None:
    with world(kind) as made:
        receiver = made.receiver
        if moment == "before":
            receiver.reserve(PROMPT)
            made.until(lambda: len(made.sender._orphans) == 1)
        sequence = made.open(PROMPT)
        pages = sequence.holding.host_pages.copy()
        made.chunk(sequence, 0, 128)
        if moment == "half":
            assert not receiver.pieces
            receiver.reserve(PROMPT)
            made.until(lambda: len(receiver.units(ROWS)) == 2 * LAYERS)
        made.chunk(sequence, 128, 300)
        made.sender.finish(UID, made.windows_of(PROMPT))
        assert sequence.state == "preempted"
        if moment == "whole":
            receiver.reserve(PROMPT)
        made.until(receiver.has_all)
        made.same_rows(pages)
        made.same_windows(PROMPT)
        assert Counter(receiver.units(ROWS)).most_common(1)[0][1] == 1, "a page came twice"
        landed(made)
        assert sequence.state == "closed"
        assert made.port.counts.sent_count == 1
        assert made.port.counts.sent_bytes == sum(each.byte_count for each in receiver.pieces)


def test_what_waited_for_the_receiver_goes_in_few_pieces() -> None:
    with world() as made:
        sequence = made.open(PROMPT)
        for start in range(0, 256, 64):
            made.chunk(sequence, start, start + 64)
        made.receiver.reserve(PROMPT)
        made.settle()
        assert [piece.kind for piece in made.receiver.pieces] == [ROWS, KEYS]
        made.chunk(sequence, 256, 300)
        made.sender.finish(UID, made.windows_of(PROMPT))
        made.settle()
        assert len(made.receiver.pieces) == 5
        landed(made)


def test_nothing_of_a_layer_leaves_before_it_is_made() -> None:
    with world() as made:
        made.receiver.reserve(PROMPT)
        sequence = made.open(PROMPT)
        for layer in range(LAYERS):
            made.make(sequence, layer, 0, 200)
            made.settle()
            assert {unit[0] for unit in made.receiver.units(ROWS)} == set(range(layer))
            made.sender.made(UID, layer, 200)
            made.settle()
            groups = [group for group, own in enumerate(LAYOUT.groups) if own[0] <= layer]
            assert set(made.receiver.units(KEYS)) == {(g, p) for g in groups for p in range(3)}
        rows = {(layer, page) for layer in range(LAYERS) for page in range(3)}
        assert set(made.receiver.units(ROWS)) == rows, "a partial page has left"
        made.chunk(sequence, 200, 300)
        made.settle()
        assert len(made.receiver.units(ROWS)) == 4 * LAYERS
        assert not made.receiver.units(WINDOWS)
        made.sender.finish(UID, made.windows_of(PROMPT))
        made.settle()
        assert Counter(made.receiver.units(ROWS))[0, 4] == 1
        landed(made)


@pytest.mark.parametrize("count", [1, 2, 65, 129])
def test_prompts_around_a_page(count: int) -> None:
    prompt = prompt_of(count)
    with world() as made:
        made.receiver.reserve(prompt)
        sequence = made.open(prompt)
        pages = sequence.holding.host_pages.copy()
        if count > 1:
            made.chunk(sequence, 0, count - 1)
        made.sender.finish(UID, None)
        made.settle()
        made.same_rows(pages)
        landed(made, prompt)


def test_cached_pages_leave_at_once_and_those_that_the_receiver_has_never() -> None:
    with world() as made:
        with made.offload.open(PROMPT) as before:
            for layer in range(LAYERS):
                made.make(before, layer, 0, 300)
        sequence = made.open(PROMPT)
        assert sequence.cached_count == 192
        made.receiver.reserve(PROMPT, first_page=1)
        made.settle()
        assert set(made.receiver.units(ROWS)) == {(n, p) for n in range(LAYERS) for p in (1, 2)}
        made.chunk(sequence, 192, 300)
        made.sender.finish(UID, made.windows_of(PROMPT))
        made.settle()
        assert made.receiver.of(Count)[0].wanted == WANTED - LAYERS - KEY_LAYERS
        landed(made)


def test_big_prompts_go_in_transfers_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "PART_BYTES_MAX", 3 * LAYOUT.page_bytes)
    monkeypatch.setattr(transfers, "UNDERWAY_BYTES_MAX", 4 * LAYOUT.page_bytes)
    with world() as made:
        sequence = made.whole(PROMPT)
        pages = sequence.holding.host_pages.copy()
        made.receiver.reserve(PROMPT)
        posted: list[int] = []

        def few_underway() -> bool:
            posted.append(sum(made.sender._transfers._underway_bytes.values()))
            return made.receiver.has_all()

        made.until(few_underway)
        assert max(posted) <= 7 * LAYOUT.page_bytes, "the bound and one transfer more"
        assert max(piece.byte_count for piece in made.receiver.pieces) <= 3 * LAYOUT.page_bytes
        made.same_rows(pages)
        landed(made)


def test_again_sends_only_what_had_been_sent() -> None:
    with world() as made:
        receiver = made.receiver
        receiver.reserve(PROMPT)
        sequence = made.open(PROMPT)
        made.chunk(sequence, 0, 128)
        made.settle()
        before = len(receiver.pieces)
        receiver.say(Again(UID, ROWS, 1, 9, 1, 1000))
        receiver.say(Again(UID, WINDOWS, 0, 1, 0, 1))
        receiver.say(Again(UID, KEYS, 60, 61, 0, 1))
        receiver.say(Again(UID, PieceKind.STATE, 0, 1, 0, 1))
        made.settle()
        [again] = receiver.pieces[before:]
        assert (again.kind, again.page_begin, again.page_end) == (ROWS, 1, 2)
        assert (again.layer_begin, again.layer_end) == (1, LAYERS)
        made.chunk(sequence, 128, 300)
        made.sender.finish(UID, made.windows_of(PROMPT))
        landed(made)


def test_pages_between_those_that_are_asked_for_again_stay() -> None:
    made, leaves = units.Units(ROWS, 1, 6, 1), []
    made.make(range(1), 6)
    for lost in ([], [0, 2, 3, 5]):
        for page in lost:
            made.again(units.Part(ROWS, range(1), range(page, page + 1)))
        while (part := made.next_part()) is not None:
            made.posted(part)
            leaves.append(part)
        for part in leaves[-3:]:
            made.landed(part)
        made.check()
    assert [part.pages for part in leaves] == [range(6), range(1), range(2, 4), range(5, 6)]


def test_again_from_another_peer_sends_nothing() -> None:
    with world() as made:
        made.receiver.reserve(PROMPT)
        made.whole(PROMPT)
        made.settle()
        before = len(made.receiver.pieces)
        for message in (Again(UID, ROWS, 0, 1, 0, 1), Release(UID, Reason.DONE)):
            made.sender.take(message, peer=made.receiver.end.epoch + 1)
        made.settle()
        assert len(made.receiver.pieces) == before
        assert not made.sender.outcomes()
        landed(made)


def test_transfers_that_failed_are_posted_again() -> None:
    """The receiver's ticket is not there at first: each transfer is refused until it is."""
    with world() as made:
        made.receiver.reserve(PROMPT)
        made.receiver.end.forbid(UID)
        sequence = made.whole(PROMPT)
        pages = sequence.holding.host_pages.copy()
        made.settle()
        failed = made.port.counts.failed_count
        assert failed > 0
        assert not made.receiver.pieces
        made.settle()
        assert made.port.counts.failed_count == failed, "it tried again without a pause"
        made.receiver.end.allow(UID)
        made.clock.advance(transfers.RETRY_S)
        made.until(made.receiver.has_all)
        made.same_rows(pages)
        landed(made)


def test_a_network_that_loses_and_alters() -> None:
    odds = {Fault.CORRUPT: 0.1, Fault.GARBLE: 0.1, Fault.DUPLICATE: 0.1, Fault.DELAY: 0.1}
    with world("faulty") as made:
        receiver = made.receiver
        made.end.register([made.end._scratch])
        sequence = made.open(PROMPT)
        pages = sequence.holding.host_pages.copy()
        receiver.end.allow(UID)
        room = receiver.room(PROMPT)
        receiver.rooms[UID] = room
        made.sender.take(room, peer=receiver.end.epoch)
        made.end._odds = odds
        for start in range(0, 300, 20):
            made.chunk(sequence, start, start + 20)
            made.round_lossy()
        made.sender.finish(UID, made.windows_of(PROMPT))
        while lacking := made.lacking():
            assert not made.sender.outcomes(), f"its lease ended before these came: {lacking}"
            for again in lacking:
                made.sender.take(again, peer=receiver.end.epoch)
            made.round_lossy()
        assert sum(made.end.injected.values()) > 10
        made.same_rows(pages)
        made.end._odds = {}
        made.sender.take(Release(UID, Reason.DONE), peer=receiver.end.epoch)
        made.until(lambda: not len(made.sender))


def test_the_sign_of_life_is_repeated_while_the_handoff_is_open() -> None:
    with world() as made:
        made.receiver.reserve(PROMPT)
        made.whole(PROMPT)
        for _ in range(3):
            made.settle()
            made.clock.advance(1.0)
        made.settle()
        counts = made.receiver.of(Count)
        assert counts[0] == Count(UID, 0, WANTED)
        assert counts[-1] == Count(UID, WANTED, WANTED)
        assert len(counts) == 4
        made.receiver.reserve(PROMPT)
        made.settle()
        assert len(made.receiver.of(Count)) == 5
        landed(made)
        made.clock.advance(1.0)
        made.settle()
        assert len(made.receiver.of(Count)) == 5


def test_a_reserved_that_comes_twice_and_another_one() -> None:
    with world() as made:
        made.open(PROMPT)
        first = made.receiver.reserve(PROMPT)
        made.receiver.reserve(PROMPT)
        made.settle()
        assert len(made.receiver.of(Count)) == 2
        made.receiver.say(replace(first, window_at=0))
        made.sender.take(first, peer=made.receiver.end.epoch + 1)
        made.settle()
        assert [each.reason for each in made.receiver.of(Refused)] == [Reason.DUPLICATE]
        assert made.port.counts.refused_count == 2
        made.sender.give_up(UID)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"text": bytes(16)}, Reason.WRONG_TEXT),
        ({"token_count": 299}, Reason.WRONG_TEXT),
        ({"first_page": 1}, Reason.WRONG_LAYOUT),
        ({"pages": (1, 2, 3, 4)}, Reason.WRONG_LAYOUT),
        ({"pages": (1, 2, 3, 4, 23)}, Reason.WRONG_LAYOUT),
        ({"window_at": 1 << 63}, Reason.WRONG_LAYOUT),
    ],
)
@pytest.mark.parametrize("is_early", [False, True])
def test_a_reserved_that_does_not_fit_is_refused(change, reason: Reason, is_early: bool) -> None:
    with world() as made:
        bad = replace(made.receiver.room(PROMPT), **change)
        if is_early:
            made.receiver.say(bad)
            made.settle()
        made.open(PROMPT)
        if not is_early:
            made.receiver.say(bad)
        made.settle()
        assert [each.reason for each in made.receiver.of(Refused)] == [reason]
        made.receiver.reserve(PROMPT)
        made.settle()
        assert len(made.receiver.of(Count)) == 1, "the right one is accepted behind it"
        made.sender.give_up(UID)


def said_to(made, listener) -> SimpleNamespace:
    """Mail that nothing is sent by: the listener gets each message."""
    return SimpleNamespace(
        now_s=made.clock.now_s, post=lambda message, peer: listener(message), wait_s=30.0
    )


def test_many_reserved_without_a_request() -> None:
    with world(wait_s=30.0) as made:
        made.checks = False
        reasons: Counter[Reason] = Counter()
        made.sender._mail = said_to(made, lambda message: reasons.update([message.reason]))
        room = Reserved(0, 0, 64, bytes(16), 0, POOL, 0, tuple(range(7)))
        pages = room.pages
        tracemalloc.start()
        for uid in range(3 * ORPHANS_MAX):
            if uid == 2 * ORPHANS_MAX:
                kept = tracemalloc.get_traced_memory()[0]
                tracemalloc.stop()
            made.sender.take(
                Reserved(uid, uid, 64, room.text, 0, POOL, 0, pages[: uid % 7]), peer=9
            )
        made.sender.check()
        assert len(made.sender._orphans) == ORPHANS_MAX
        assert kept < 8 << 20, f"{kept} bytes are kept"
        assert reasons == {Reason.FULL: 2 * ORPHANS_MAX}
        made.clock.advance(30.0)
        made.sender.expire()
        assert len(made.sender._orphans) == 0
        assert reasons[Reason.UNKNOWN] == ORPHANS_MAX


def test_a_reserved_without_a_request_waits_from_its_last_copy_on() -> None:
    with world(wait_s=5.0) as made:
        for _ in range(2):
            made.receiver.reserve(PROMPT)
            made.settle()
            made.clock.advance(4.9)
            made.settle()
            assert len(made.sender._orphans) == 1
        made.clock.advance(0.2)
        made.settle()
        assert [each.reason for each in made.receiver.of(Refused)] == [Reason.UNKNOWN]


POOL = 4000


def test_the_pages_of_waiting_reserved_are_bounded() -> None:
    with world() as made:
        made.sender._mail = said_to(made, lambda message: None)
        room = Reserved(0, 0, 64, bytes(16), 0, 1 << 20, 0, tuple(range(1 << 15)))
        for uid in range(200):
            made.sender.take(replace(room, uid=uid), peer=9)
        made.sender.check()
        assert len(made.sender._orphans) == 128
        made.sender.take(Release(3, Reason.ABORTED), peer=8)
        assert 3 in made.sender._orphans
        made.sender.take(Release(3, Reason.ABORTED), peer=9)
        assert 3 not in made.sender._orphans


def test_a_uid_is_offered_once_and_as_many_as_there_may_be(monkeypatch) -> None:
    monkeypatch.setattr(sender, "DEPARTURES_MAX", 2)
    with world() as made:
        sequences = [made.open(prompt_of(65, seed), uid=seed) for seed in (1, 2)]
        third = made.offload.open(prompt_of(65, 3))
        with pytest.raises(BadInput, match="handoff 1 is open already"):
            made.sender.offer(1, third, prompt=prompt_of(65, 3), salt=b"")
        with pytest.raises(PoolFull, match="all 2 handoffs are open"):
            made.sender.offer(3, third, prompt=prompt_of(65, 3), salt=b"")
        for uid in (1, 2):
            made.sender.give_up(uid)
        made.sender.offer(3, third, prompt=prompt_of(65, 3), salt=b"")
        made.sender.give_up(3)
        for sequence in (*sequences, third):
            sequence.close()


def test_more_handoffs_at_once_than_places_to_pack_windows() -> None:
    prompts = {uid: prompt_of(65, uid) for uid in range(1, PLACES + 3)}
    with world() as made:
        for uid, prompt in prompts.items():
            made.whole(prompt, uid)
        for uid, prompt in prompts.items():
            made.receiver.rooms[uid] = made.receiver.room(prompt, uid)
            made.receiver.end.allow(uid)
            made.sender.take(made.receiver.rooms[uid], peer=made.receiver.end.epoch)
        assert made.sender._transfers._packed.lend(b"") is None, "a place is left"
        made.until(lambda: all(made.receiver.units(WINDOWS, uid) for uid in prompts))
        for uid in prompts:
            made.done(uid)
        made.until(lambda: not len(made.sender))
        assert made.port.counts.sent_count == len(prompts)


def test_rows_that_were_never_stored_do_not_leave() -> None:
    with world() as made:
        made.receiver.reserve(PROMPT)
        made.settle()
        sequence = made.open(PROMPT)
        with pytest.raises(AssertionError, match="is not stored"):
            made.sender.made(UID, 0, 64)
        made.sender.give_up(UID)
        sequence.close()
        assert np.all(made.receiver.rows == 0xFF)
