"""The receiver's count: what is taken, what is refused, and when it is complete."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from ess.transfer.arrivals import Arrival, Arrivals, Share, Verdict
from ess.transfer.messages import Again, Count, Piece, PieceKind, Reason, checksum
from tests.support.manual_clock import ManualClock

UNIT = 24
LAYERS, PAGES = 6, 11
PREFILL, OTHER = 111, 222

SHARES = [
    Share(kind=PieceKind.ROWS, layer_begin=0, layer_end=5, page_count=PAGES, unit_bytes=UNIT),
    Share(kind=PieceKind.INDEX_KEYS, layer_begin=5, layer_end=6, page_count=PAGES, unit_bytes=UNIT),
    Share(kind=PieceKind.WINDOWS, layer_begin=0, layer_end=1, page_count=1, unit_bytes=UNIT),
]
WANTED = 6 * PAGES + 1


class Landed:
    """Memory in which pieces lie, by kind."""

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self.units = {
            kind: draw.integers(0, 256, (LAYERS, PAGES, UNIT), np.uint8) for kind in PieceKind
        }

    def read(self, piece: Piece) -> list[memoryview]:
        units = self.units[piece.kind]
        return [
            units[layer, piece.page_begin : piece.page_end].data.cast("B")
            for layer in range(piece.layer_begin, piece.layer_end)
        ]

    def piece(self, kind: PieceKind, layers: tuple[int, int], pages: tuple[int, int]) -> Piece:
        count = (layers[1] - layers[0]) * (pages[1] - pages[0]) * UNIT
        told = Piece(9, kind, *layers, *pages, count, 0)
        return Piece(9, kind, *layers, *pages, count, checksum(self.read(told)))


@pytest.fixture
def landed() -> Landed:
    return Landed()


def arrival() -> Arrival:
    return Arrival(uid=9, sender=PREFILL, shares=SHARES)


def all_pieces(landed: Landed) -> list[Piece]:
    rows = [
        landed.piece(PieceKind.ROWS, (layer, layer + 1), pages)
        for layer in range(5)
        for pages in ((0, 4), (4, 8), (8, PAGES))
    ]
    keys = landed.piece(PieceKind.INDEX_KEYS, (5, 6), (0, PAGES))
    return [*rows, keys, landed.piece(PieceKind.WINDOWS, (0, 1), (0, 1))]


def test_complete_is_when_all_has_come_in_any_order(landed: Landed) -> None:
    for seed in range(50):
        coming = arrival()
        pieces = all_pieces(landed)
        random.Random(seed).shuffle(pieces)
        for piece in pieces:
            assert not coming.is_complete
            assert coming.take(piece, read=landed.read) is Verdict.TAKEN
            again = coming.take(piece, read=landed.read)
            assert again is Verdict.DUPLICATE
        assert coming.is_complete
        assert coming.count == Count(9, WANTED, WANTED)
        assert list(coming.missing()) == []


def test_without_any_one_piece_nothing_is_complete(landed: Landed) -> None:
    for lacking in all_pieces(landed):
        coming = arrival()
        for piece in all_pieces(landed):
            if piece != lacking:
                coming.take(piece, read=landed.read)
        assert not coming.is_complete
        (again,) = coming.missing()
        assert again == Again(
            *(9, lacking.kind, lacking.layer_begin, lacking.layer_end),
            *(lacking.page_begin, lacking.page_end),
        )


def test_random_holes_are_named_exactly(landed: Landed) -> None:
    for seed in range(300):
        draw = random.Random(seed)
        coming = arrival()
        came = np.zeros((5, PAGES), bool)
        for _ in range(draw.randrange(12)):
            layer, page = draw.randrange(5), draw.randrange(PAGES)
            end = draw.randint(page + 1, PAGES)
            piece = landed.piece(PieceKind.ROWS, (layer, layer + 1), (page, end))
            coming.take(piece, read=landed.read)
            came[layer, page:end] = True
        named = np.zeros_like(came)
        for again in coming.missing():
            if again.kind is PieceKind.ROWS:
                layers = slice(again.layer_begin, again.layer_end)
                assert not named[layers, again.page_begin : again.page_end].any()
                named[layers, again.page_begin : again.page_end] = True
        assert np.array_equal(named, ~came)
        assert coming.count.arrived == came.sum()
        coming.check()


@pytest.mark.parametrize(
    ("kind", "layers", "pages", "byte_count"),
    [
        (PieceKind.ROWS, (4, 6), (0, 1), 2 * UNIT),
        (PieceKind.ROWS, (0, 1), (10, 12), 2 * UNIT),
        (PieceKind.ROWS, (0, 1), (2**32 - 2, 2**32 - 1), UNIT),
        (PieceKind.ROWS, (0, 1), (0, 1), UNIT - 1),
        (PieceKind.ROWS, (0, 1), (0, 1), 2 * UNIT),
        (PieceKind.INDEX_KEYS, (0, 1), (0, 1), UNIT),
        (PieceKind.INDEX_KEYS, (5, 6), (0, 1), UNIT - 1),
        (PieceKind.WINDOWS, (0, 1), (0, 1), UNIT + 1),
        (PieceKind.WINDOWS, (0, 1), (0, 2), UNIT),
    ],
)
def test_what_was_not_promised_is_outside(kind, layers, pages, byte_count) -> None:
    def unread(piece: Piece) -> list[memoryview]:
        raise AssertionError("the bytes of a piece outside are not looked at")

    piece = Piece(9, kind, *layers, *pages, byte_count, 0)
    assert arrival().take(piece, read=unread) is Verdict.OUTSIDE


def test_every_flip_of_a_bit_is_found(landed: Landed) -> None:
    piece = landed.piece(PieceKind.ROWS, (1, 2), (0, 4))
    for bit in range(8 * 4 * UNIT):
        coming = arrival()
        unit = landed.units[PieceKind.ROWS][1].reshape(-1)
        unit[bit // 8] ^= 1 << bit % 8
        assert coming.take(piece, read=landed.read) is Verdict.CORRUPT
        assert coming.count.arrived == 0
        unit[bit // 8] ^= 1 << bit % 8
        assert coming.take(piece, read=landed.read) is Verdict.TAKEN


def test_a_corrupt_second_copy_takes_the_first_back(landed: Landed) -> None:
    coming = arrival()
    for piece in all_pieces(landed):
        coming.take(piece, read=landed.read)
    again = landed.piece(PieceKind.ROWS, (0, 1), (2, 6))
    landed.units[PieceKind.ROWS][0, 3, 5] ^= 4
    assert coming.take(again, read=landed.read) is Verdict.CORRUPT
    assert not coming.is_complete
    assert list(coming.missing()) == [Again(9, PieceKind.ROWS, 0, 1, 2, 6)]


def test_neighbouring_layers_that_lack_the_same_are_asked_for_together(landed: Landed) -> None:
    coming = arrival()
    for layer, pages in ((0, (0, 4)), (1, (0, 4)), (2, (0, 3))):
        piece = landed.piece(PieceKind.ROWS, (layer, layer + 1), pages)
        coming.take(piece, read=landed.read)
    rows = [again for again in coming.missing() if again.kind is PieceKind.ROWS]
    assert rows == [
        Again(9, PieceKind.ROWS, 0, 2, 4, PAGES),
        Again(9, PieceKind.ROWS, 2, 3, 3, PAGES),
        Again(9, PieceKind.ROWS, 3, 5, 0, PAGES),
    ]


def test_pages_that_the_receiver_has_are_outside(landed: Landed) -> None:
    share = replace(SHARES[0], page_begin=4, page_count=PAGES - 4)
    coming = Arrival(uid=9, sender=PREFILL, shares=[share])
    early = landed.piece(PieceKind.ROWS, (0, 5), (3, PAGES))
    assert coming.take(early, read=landed.read) is Verdict.OUTSIDE
    assert list(coming.missing()) == [Again(9, PieceKind.ROWS, 0, 5, 4, PAGES)]
    due = landed.piece(PieceKind.ROWS, (0, 5), (4, PAGES))
    assert coming.take(due, read=landed.read) is Verdict.TAKEN
    assert coming.is_complete


def test_layers_of_unequal_rows_have_sizes_of_their_own() -> None:
    rows = PieceKind.ROWS
    sizes = Share(
        kind=rows, layer_begin=2, layer_end=5, page_count=3, unit_bytes=30, layer_bytes=(10, 20, 30)
    )
    for layers, size in (((2, 3), 10), ((3, 5), 50), ((2, 5), 60)):
        piece = Piece(9, rows, *layers, 1, 3, 2 * size, 0)
        assert sizes.holds(piece)
        assert not sizes.holds(replace(piece, byte_count=2 * size + 1))


def test_windows_are_of_any_size_that_fits(landed: Landed) -> None:
    coming = arrival()
    assert coming.window_bytes == 0
    for size in (1, UNIT, UNIT - 5):
        part = [memoryview(landed.read(landed.piece(PieceKind.WINDOWS, (0, 1), (0, 1)))[0])[:size]]
        piece = Piece(9, PieceKind.WINDOWS, 0, 1, 0, 1, size, checksum(part))
        coming.take(piece, read=lambda _, part=part: part)
        assert coming.window_bytes == size
    assert coming.count.arrived == 1


def test_a_foreign_sender_and_a_former_boot_are_refused(landed: Landed) -> None:
    arrivals = Arrivals(clock=ManualClock())
    assert arrivals.expect(uid=9, sender=PREFILL, shares=SHARES, within_s=30) is None
    for piece in all_pieces(landed):
        assert arrivals.take(piece, sender=OTHER, read=landed.read) is Verdict.UNKNOWN
    assert arrivals.find(9, sender=OTHER) is None
    kept = arrivals.find(9, sender=PREFILL)
    assert kept is not None
    assert kept.count.arrived == 0


def test_a_uid_in_use_and_a_full_house_are_refused() -> None:
    arrivals = Arrivals(clock=ManualClock(), handoffs_max=3)
    assert [
        arrivals.expect(uid=uid, sender=PREFILL, shares=SHARES, within_s=30)
        for uid in (1, 2, 2, 3, 4)
    ] == [None, None, Reason.DUPLICATE, None, Reason.FULL]
    arrivals.close(1, sender=PREFILL)
    assert arrivals.expect(uid=4, sender=OTHER, shares=SHARES, within_s=30) is None
    for uid in (2, 3):
        arrivals.close(uid, sender=PREFILL)
    assert len(arrivals) == 1
    arrivals.check()


def test_two_senders_of_a_handoff_are_counted_apart(landed: Landed) -> None:
    """Each has layers of its own; what one brings of the other's is outside of its share."""
    clock = ManualClock()
    arrivals = Arrivals(clock=clock)
    halves = {PREFILL: range(2), OTHER: range(2, 4)}
    for number, (sender, layers) in enumerate(halves.items()):
        share = replace(SHARES[0], layer_begin=layers.start, layer_end=layers.stop)
        assert arrivals.expect(uid=9, sender=sender, shares=[share], within_s=30 + number) is None
    for sender in halves:
        assert arrivals.expect(uid=9, sender=sender, shares=SHARES, within_s=9) is Reason.DUPLICATE
    mine = landed.piece(PieceKind.ROWS, (2, 4), (0, PAGES))
    assert arrivals.take(mine, sender=PREFILL, read=landed.read) is Verdict.OUTSIDE
    assert arrivals.take(mine, sender=OTHER, read=landed.read) is Verdict.TAKEN
    assert arrivals.take(mine, sender=3, read=landed.read) is Verdict.UNKNOWN
    first, second = (arrivals.find(9, sender=sender) for sender in halves)
    assert first is not None
    assert second is not None
    assert (first.is_complete, second.is_complete) == (False, True)
    arrivals.check()
    clock.advance(30.5)
    assert arrivals.expired() == [first]
    arrivals.close(9, sender=PREFILL)
    assert arrivals.take(mine, sender=PREFILL, read=landed.read) is Verdict.UNKNOWN
    arrivals.close(9, sender=OTHER)
    assert arrivals.take(mine, sender=OTHER, read=landed.read) is Verdict.UNKNOWN
    arrivals.check()


def test_a_handoff_ends_at_its_deadline(landed: Landed) -> None:
    clock = ManualClock()
    arrivals = Arrivals(clock=clock)
    arrivals.expect(uid=9, sender=PREFILL, shares=SHARES, within_s=30)
    arrivals.expect(uid=8, sender=PREFILL, shares=SHARES, within_s=31)
    clock.advance(29.9)
    assert arrivals.expired() == []
    clock.advance(0.1)
    assert [late.uid for late in arrivals.expired()] == [9]
    for piece in all_pieces(landed):
        assert arrivals.take(piece, sender=PREFILL, read=landed.read) is Verdict.UNKNOWN
    assert len(arrivals) == 1
    arrivals.check()


def test_a_sign_of_life_extends_the_deadline(landed: Landed) -> None:
    clock = ManualClock()
    arrivals = Arrivals(clock=clock)
    arrivals.expect(uid=9, sender=PREFILL, shares=SHARES, within_s=30)
    clock.advance(20)
    arrivals.heard(9, sender=PREFILL)
    clock.advance(20)
    assert arrivals.expired() == []
    piece = landed.piece(PieceKind.ROWS, (0, 1), (0, 1))
    assert arrivals.take(piece, sender=PREFILL, read=landed.read) is Verdict.TAKEN
    clock.advance(29)
    assert arrivals.expired() == []
    assert arrivals.take(piece, sender=PREFILL, read=landed.read) is Verdict.DUPLICATE
    arrivals.heard(9, sender=OTHER)
    arrivals.heard(8, sender=PREFILL)
    clock.advance(1)
    assert [late.uid for late in arrivals.expired()] == [9]
    arrivals.check()


def test_many_unknown_uids_cost_no_memory(landed: Landed) -> None:
    arrivals = Arrivals(clock=ManualClock())
    arrivals.expect(uid=9, sender=PREFILL, shares=SHARES, within_s=30)
    piece = landed.piece(PieceKind.ROWS, (0, 1), (0, 1))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for uid in range(1_000, 51_000):
        object.__setattr__(piece, "uid", uid)
        verdict = arrivals.take(piece, sender=PREFILL, read=landed.read)
        assert verdict is Verdict.UNKNOWN
    grown = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert len(arrivals) == 1
    assert grown < 64 << 10
