from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ess import cost
from ess.cost import Calibration, Hiding

BEHIND = Hiding(window_us=255.0, index_us=536.0, da_cost_us=27.0, dba_cost_us=36.0)

TIMES = {
    "attend_us": 5.0,
    "index_us": 4.0,
    "split_us": 1.0,
    "index_split_us": 1.0,
    "missing_share": 0.5,
}


def test_transfer_is_the_published_one_in_gib():
    rate = cost.bytes_per_us(37.0)
    moved = cost.transfer_us(miss_count=512, request_count=80, row_bytes=656, bytes_per_us=rate)
    assert moved == pytest.approx(676.3, abs=0.1)


@pytest.mark.parametrize(
    ("moved_us", "expected"),
    [
        (20.0, (20.0, 27.0, 36.0)),
        (300.0, (300.0, 45.0, 36.0)),
        (676.0, (676.0, 421.0, 153.0)),
    ],
)
def test_exposed_follows_the_design(moved_us: float, expected: tuple[float, float, float]):
    assert cost.exposed(moved_us, BEHIND) == pytest.approx(expected)


def test_what_stands_between_a_fetch_and_its_wait_hides_it_without_a_split():
    behind = replace(BEHIND, ahead_us=100.0)
    assert cost.exposed(300.0, behind) == pytest.approx((200.0, 45.0, 36.0))
    assert cost.exposed(99.0, behind).none == 0.0
    assert cost.hiding(pre_attn_us=9.0, **TIMES).ahead_us == 0.0
    assert cost.hiding(pre_attn_us=9.0, waits_late=True, **TIMES).ahead_us == 9.0


@given(st.floats(0, 5000), st.floats(0, 5000))
def test_more_to_move_never_shows_less(first: float, more: float):
    low, high = cost.exposed(first, BEHIND), cost.exposed(first + more, BEHIND)
    assert all(a <= b for a, b in zip(low, high, strict=True))


def test_hiding_from_constants():
    constants = Calibration(
        pre_attn_fixed_us=10.0,
        pre_attn_query_us=0.5,
        attend_query_us=1.5,
        index_fixed_us=5.0,
        index_key_us=1e-5,
        split_fixed_us=2.0,
        split_query_us=0.25,
        index_split_us=6.0,
    )
    half = constants.hiding(query_count=100, key_count=1_000_000, missing_share=0.5)
    assert half == Hiding(window_us=60.0 + 75.0 - 27.0, index_us=15.0, da_cost_us=27.0,
                          dba_cost_us=33.0)  # fmt: skip
    nothing = constants.hiding(query_count=1, key_count=0, missing_share=1.0)
    assert nothing.window_us == pytest.approx(10.5 - 2.25)
