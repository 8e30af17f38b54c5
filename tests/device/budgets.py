"""Whole engines whose slots change their layers between steps: run by `test_pretended_steps`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ess.door.residency import budgets
from tests.device import engines
from tests.device.drafts import expected, scenario
from tests.device.steps import close

pytestmark = pytest.mark.usefixtures("alone")

CASES = (("v32", "dba", "2", "1", "ample", "many"), ("glm", "none", "4", "0", "ample", "off"))


@pytest.mark.parametrize("values", CASES, ids="-".join)
def test_the_tokens_are_those_of_the_host(values, monkeypatch):
    """A chunk moves wherever one can, every third step, also between replays of a graph."""
    targets = itertools.count()

    def forced(curves, chunks, floors, wanted):
        assert all(np.isfinite(curve).all() for curve in curves)
        source = int(np.argmax(np.array(chunks) - np.array(floors)))
        target = next(number for number in targets if number % len(chunks) != source)
        return (source, target % len(chunks)) if chunks[source] > floors[source] else None

    monkeypatch.setattr(budgets, "next_move", forced)
    case = dict(zip((*engines.FACTORS, "graphs"), values, strict=True))
    eng = engines.engine("cuda", budget_every=3, **case)
    close(scenario(eng), expected(case["family"]))
    assert eng.moved_count > 1
