"""Whole engines whose slots change their layers, or run out: run by `test_pretended_steps`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ess.door.residency import budgets
from ess.engine.tokens.sampling import Sampling
from ess.overlap.policy import Mode
from tests.device import engines
from tests.device.drafts import expected, scenario
from tests.device.steps import close
from tests.support.checkpoints import tokens

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


def test_requests_run_resident_until_they_outgrow_all_slots():
    def said(eng):
        sampling = Sampling(tokens_max=9, ignore_eos=True)
        requests = [eng.add(tokens(28, engines.VOCABULARY, seed=n), sampling) for n in (1, 2)]
        for _ in eng.run():
            eng.check()
        return [request.output for request in requests]

    case = {"mode": "resident", "depth": "1"}
    eng = engines.engine("cuda", arena="smallest", **case)
    assert said(eng) == said(engines.engine("cpu", **case))
    assert eng.runner.tuning.mode_counts[0, [Mode.RESIDENT, Mode.NONE]].all()
