"""How long clients wait: what the server counts for every token."""

from __future__ import annotations

import pytest

from ess.server.dialects.streaming import Times
from ess.server.process.tally import Tally
from tests.support.manual_clock import ManualClock


def test_every_token_counts_once_however_many_come_in_a_piece():
    """One token, then three after 187.5 ms, then two after 500 ms: waits of 62.5 ms three times and
    of 250 ms twice."""
    clock, tally = ManualClock(), Tally()
    times = Times(clock, tally)
    for after_s, count in ((0.5, 1), (0.1875, 3), (0.5, 2)):
        clock.advance(after_s)
        times.tokens(0, count, clock.now_s())
    assert (tally.first_token.count, tally.first_token.total_s) == (1, 0.5)
    assert tally.between_tokens.count == 5
    assert tally.between_tokens.total_s == 0.6875
    assert tally.between_tokens.mean_s == pytest.approx(0.1375)
    assert sorted(tally.between_tokens.counts)[-2:] == [2, 3]
