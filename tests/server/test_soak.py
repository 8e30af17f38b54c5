"""The soak's own arithmetic, and twenty seconds of it."""

from __future__ import annotations

import math

import pytest

from tests.server.soak import Seen, Slope, soak


def test_a_slope_is_a_line_s_and_its_error_the_noise_s() -> None:
    minutes = [at / 10 for at in range(50)]
    assert Slope.of(minutes, [3 + 2 * at for at in minutes]).per_minute == pytest.approx(2)
    noise = [(-1) ** at for at in range(50)]
    noisy = Slope.of(minutes, [3 + up for up in noise])
    assert abs(noisy.per_minute) < 2 * noisy.error
    assert math.isnan(Slope.of([1.0, 2.0], [1.0, 2.0]).per_minute)


def test_an_answer_unlike_that_of_before_is_told() -> None:
    seen = Seen()
    for text in ("abc", "ab", "abcd"):
        seen.said(1, text)
    assert not seen.wrong
    seen.said(1, "abx")
    assert seen.wrong


@pytest.mark.slow
@pytest.mark.long
def test_a_server_under_twice_its_capacity() -> None:
    told = soak(20.0, kill_every_s=12.0)
    assert not told.seen.wrong
    assert sum(told.seen.ends.values()) > 0
    assert told.kills == 1
