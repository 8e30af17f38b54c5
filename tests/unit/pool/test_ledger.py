from __future__ import annotations

import pytest

from ess.errors import PoolFull
from ess.pool.ledger import Account, Ledger

ROW = 61 * 656


def ledger(slots: int = 100, pages: int = 10, used: int = 0) -> Ledger:
    return Ledger(
        [
            Account(name="slots", unit_bytes=ROW, capacity=slots, times=" x 61 groups"),
            Account(name="pages", unit_bytes=64, capacity=pages, used=lambda: used),
        ]
    )


def test_all_or_nothing():
    books = ledger()
    books.reserve({"slots": 60, "pages": 4})
    with pytest.raises(PoolFull):
        books.reserve({"slots": 41, "pages": 1})
    assert books.free("slots") == 40
    assert books.free("pages") == 6, "the refused reservation took nothing"
    books.reserve({"slots": 40, "pages": 6})
    assert books.free("slots") == books.free("pages") == 0
    books.check()


def test_a_refusal_names_the_limiter_and_the_numbers():
    books = ledger(slots=42_600)
    books.reserve({"slots": 16_386})
    with pytest.raises(PoolFull) as refusal:
        books.reserve({"slots": 26_215})
    assert str(refusal.value) == "needs 26,215 slots x 61 groups = 1000.42 MiB, 1000.38 MiB free"
    assert (refusal.value.limiter, refusal.value.needed) == ("slots", 26_215)
    assert refusal.value.free == 26_214
    assert refusal.value.retry_after_s == 1.0


def test_what_can_never_fit_says_so():
    with pytest.raises(PoolFull, match="more than the pool's 640 B") as refusal:
        ledger().reserve({"pages": 11})
    assert refusal.value.retry_after_s is None


def test_what_empty_pools_would_hold_may_wait():
    books = ledger()
    books.reserve({"pages": 10})
    assert books.free("slots") == 100, "no reservation has slots"
    books.require({"slots": 100, "pages": 10})
    with pytest.raises(PoolFull, match="more than the pool's 640 B") as refusal:
        books.require({"slots": 1, "pages": 11})
    assert (refusal.value.retry_after_s, refusal.value.free) == (None, 0)
    assert books.free("slots") == 100


def test_the_worst_shortage_is_the_limiter():
    books = ledger(slots=10, pages=10)
    books.reserve({"slots": 9, "pages": 5})
    with pytest.raises(PoolFull) as refusal:
        books.reserve({"slots": 10, "pages": 6})
    assert refusal.value.limiter == "slots"


def test_drawn_promises_count_where_the_pool_counts_them():
    used = 0
    account = Account(name="pages", unit_bytes=1, capacity=8, used=lambda: used)
    books = Ledger([account])
    reservation = books.reserve({"pages": 6})
    assert books.free("pages") == 2
    books.draw(reservation, "pages", 4)
    used = 4
    assert books.free("pages") == 2
    books.release(reservation)
    assert books.free("pages") == 4, "what was drawn belongs to the pool now"
    books.check()


def test_a_sequence_grows_without_a_look_at_the_promises_of_others():
    """Where 160 grow by a page in one step, that would be 160 looks for each."""
    books = ledger()
    books.reserve({"pages": 3}).promised = {}
    books.extend(books.reserve({}), {"pages": 2})
    assert books.free("pages") == 5


def test_extending_is_refused_like_reserving():
    books = ledger(pages=5)
    reservation = books.reserve({"pages": 3})
    books.extend(reservation, {"pages": 2})
    with pytest.raises(PoolFull):
        books.extend(reservation, {"pages": 1})
    assert reservation.promised["pages"] == 5


@pytest.mark.parametrize(
    ("released", "misuse"),
    [
        (False, lambda books, reservation: books.draw(reservation, "pages", 3)),
        (True, lambda books, reservation: books.draw(reservation, "pages", 1)),
        (True, lambda books, reservation: books.release(reservation)),
    ],
    ids=["draw too much", "draw after release", "release twice"],
)
def test_misuse_is_an_assertion(released, misuse):
    books = ledger()
    reservation = books.reserve({"pages": 2})
    if released:
        books.release(reservation)
    with pytest.raises(AssertionError):
        misuse(books, reservation)
