from __future__ import annotations

import numpy as np
import pytest

from ess.pool.pages import PagePool


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def test_pages_are_taken_lowest_first_and_come_back():
    pool = PagePool(4)
    assert pool.take(3).tolist() == [0, 1, 2]
    assert pool.free_count == 1
    idle = pool.drop(ids(1, 2))
    assert idle.tolist() == [1, 2]
    assert pool.free_count == 1, "idle is not free"
    pool.give_back(idle)
    assert pool.free_count == 3
    pool.check()


def test_a_page_is_idle_only_when_its_last_holder_leaves():
    pool = PagePool(2)
    page = pool.take(1)
    pool.hold(page)
    assert pool.hold_count(0) == 2
    assert pool.drop(page).tolist() == []
    assert pool.drop(page).tolist() == [0]
    assert pool.hold_count(0) == 0
    pool.hold(page)
    assert pool.hold_count(0) == 1, "an idle page can be held again"
    pool.check()


def test_one_call_may_name_a_page_twice():
    pool = PagePool(1)
    page = pool.take(1)
    pool.hold(ids(0, 0))
    assert pool.hold_count(0) == 3
    assert pool.drop(ids(0, 0)).tolist() == []
    assert pool.drop(page).tolist() == [0]


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool: pool.take(3),
        lambda pool: pool.hold(ids(1)),
        lambda pool: pool.drop(ids(1)),
        lambda pool: pool.give_back(ids(0)),
        lambda pool: pool.give_back(ids(1)),
    ],
    ids=["take too many", "hold a free one", "drop a free one", "free a held one", "free twice"],
)
def test_misuse_is_an_assertion(misuse):
    pool = PagePool(2)
    pool.take(1)
    with pytest.raises(AssertionError):
        misuse(pool)


def test_against_a_dictionary():
    random = np.random.default_rng(3)
    pool, held, idle = PagePool(12), {}, set()
    for _ in range(3000):
        choice = random.integers(4)
        if choice == 0 and pool.free_count:
            for page in pool.take(int(random.integers(1, pool.free_count + 1))).tolist():
                assert page not in held
                assert page not in idle
                held[page] = 1
        elif choice == 1 and held:
            page = int(random.choice(list(held)))
            pool.hold(ids(page))
            held[page] += 1
        elif choice == 2 and held:
            page = int(random.choice(list(held)))
            held[page] -= 1
            left = pool.drop(ids(page)).tolist()
            assert left == ([page] if held[page] == 0 else [])
            if left:
                del held[page]
                idle.add(page)
        elif choice == 3 and idle:
            page = int(random.choice(list(idle)))
            pool.give_back(ids(page))
            idle.discard(page)
        pool.check()
        assert pool.free_count == 12 - len(held) - len(idle)
        assert all(pool.hold_count(page) == count for page, count in held.items())
