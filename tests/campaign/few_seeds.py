"""A few seeds, for what the tests of an area let live (`tests.model.mutants`). No test by its name:
`test_campaign` plays more."""

from __future__ import annotations

import pytest

from tests.campaign.plan import drawn
from tests.campaign.world import play

SEEDS = range(2000, 2006)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed(seed: int) -> None:
    play(drawn(seed))
