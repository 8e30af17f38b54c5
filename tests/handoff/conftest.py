"""Receivers with a peer that the test controls, over transports that guard their pages or not."""

from __future__ import annotations

import pytest

from tests.handoff.receiving import GUARDED, KINDS, paired


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest):
    with paired(request.param) as made:
        yield made


@pytest.fixture(params=GUARDED)
def guarded(request: pytest.FixtureRequest):
    with paired(request.param) as made:
        yield made


@pytest.fixture
def unguarded():
    with paired("unguarded") as made:
        yield made
