"""Whole engines over the device's own door: run by `test_pretended_steps`."""

from __future__ import annotations

import pytest

from tests.device import engines
from tests.device.steps import close

CASES = (
    ("glm", "resident", "1", "0", "ample"),
    ("v32", "none", "2", "1", "ample"),
    ("v32", "dba", "2", "0", "tight"),
    ("glm", "layerwise", "1", "1", "smallest"),
)


@pytest.fixture(autouse=True)
def alone():
    with engines.alone():
        yield


@pytest.mark.parametrize("values", CASES, ids="-".join)
def test_the_tokens_are_those_of_the_host(values):
    case = dict(zip(engines.FACTORS, values, strict=True))
    said = engines.scenario(engines.engine("cuda", **case))
    close(said, engines.expected(case["family"]))
