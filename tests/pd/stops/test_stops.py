"""A handoff outlives whatever its workers do: some of the points of `python -m tests.pd.stops`."""

from __future__ import annotations

import itertools

import pytest

from tests.pd.stops.actors import TRANSPORTS
from tests.pd.stops.pair import POLICIES, play
from tests.support.few import few

CASES = list(itertools.product((0, 1), ("kill", 0.2, 7.0), (40, 130, 290)))
KINDS = list(itertools.product(TRANSPORTS, POLICIES, (False, True)))


FEW = (0, 3, 4, 7, 8, 11, 12, 15, 16)
"""Every side with every stop, and every transport with every policy and both orders."""


@pytest.mark.slow
@pytest.mark.parametrize("number", few(FEW, all_of=range(len(CASES))))
def test_a_worker_that_stops_leaves_nothing_behind(number: int) -> None:
    """Each case with one of the transports, policies and orders."""
    side, stop, at = CASES[number]
    transport, policy, take_first = KINDS[5 * number % len(KINDS)]
    ends = play(transport, policy, side=side, stop=stop, at=at, take_first=take_first)
    assert ends, f"no worker has come to point {at}"
