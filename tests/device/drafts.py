"""Steps of 3 and 4 tokens over the device's own door: run by `test_forward_steps`.

`steps` has every pair of settings over a door that is quick; here are few steps, all of drafts.
"""

from __future__ import annotations

import functools

import pytest

from ess.engine.engine import Engine
from ess.engine.tokens.sampling import Sampling
from tests.device import engines
from tests.device.steps import close
from tests.support.checkpoints import tokens

pytestmark = pytest.mark.usefixtures("alone")

CASES = (("glm", "dba", "4", "1", "tight"),)
LONG = (
    ("v32", "none", "3", "1", "ample"),
    ("v32", "resident", "4", "0", "ample"),
    ("glm", "layerwise", "3", "0", "smallest"),
)


def scenario(eng: Engine) -> list[tuple[list[int], list[object]]]:
    chances: dict[object, list[object]] = {}
    requests = [
        eng.add(
            tokens(count, engines.VOCABULARY, seed=count),
            Sampling(tokens_max=6, ignore_eos=True, logprobs=1, **given),
        )
        for count, given in ((70, {}), (1, {"temperature": 0.8, "top_p": 0.9, "seed": 4}))
    ]
    while not eng.is_idle:
        for made in eng.step().made:
            chances.setdefault(made.request, []).extend(made.chances)
    eng.offload.drain()
    eng.check()
    assert eng.offload.stats().used_slot_count.sum() == 0
    eng.offload.close()
    return [(request.output, chances[request]) for request in requests]


@functools.cache
def expected(family: str):
    return scenario(engines.engine("cpu", family=family))


@pytest.mark.parametrize(
    "values", [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)], ids="-".join
)
def test_the_tokens_are_those_of_the_host(values):
    case = dict(zip(engines.FACTORS, values, strict=True))
    close(scenario(engines.engine("cuda", **case)), expected(case["family"]))
