"""Whole engines over the device's own door, their steps replayed from graphs: run by
`test_pretended_steps`."""

from __future__ import annotations

import pytest

from tests.device import engines
from tests.device.steps import close

CASES = (
    ("glm", "resident", "1", "0", "ample", "many"),
    ("v32", "none", "2", "1", "ample", "few"),
    ("v32", "dba", "4", "0", "tight", "many"),
    ("glm", "layerwise", "1", "1", "smallest", "many"),
)


@pytest.fixture(autouse=True)
def alone():
    with engines.alone():
        yield


@pytest.mark.parametrize("values", CASES, ids="-".join)
def test_the_tokens_are_those_of_the_host(values):
    case = dict(zip((*engines.FACTORS, "graphs"), values, strict=True))
    eng = engines.engine("cuda", **case)
    close(engines.scenario(eng), engines.expected(case["family"]))
    made = eng._flights.replays.report()
    assert made["replayed"] > 0
    assert 0 < made["held"] <= engines.GRAPHS[case["graphs"]]
    assert made["eager"].keys() == {"first steps"}
