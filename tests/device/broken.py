"""A request of which the model makes no numbers, on the pretended device: it ends alone, as on the
host. Run by `test_pretended_steps`."""

from __future__ import annotations

import math

import pytest

from ess.engine.engine import Engine
from ess.engine.requests.request import Request
from ess.engine.tokens.sampling import Sampling
from tests.device import engines
from tests.support.checkpoints import tokens

pytestmark = pytest.mark.usefixtures("alone")

FAMILY = "v32"
BAD = engines.VOCABULARY - 1
MADE = 5
PLAIN = (
    (tokens(70, BAD, seed=1), Sampling(tokens_max=MADE, ignore_eos=True)),
    (tokens(3, BAD, seed=2), Sampling(tokens_max=MADE, temperature=1.0, seed=3, ignore_eos=True)),
)
BROKEN = (
    ([*tokens(5, BAD, seed=3), BAD, 1], Sampling(temperature=1.0, top_p=0.9, logprobs=2)),
    ([BAD], Sampling(tokens_max=MADE)),
)
CASES = (
    {"door": False, "mtp": "3", "depth": "1"},
    {"door": False, "mode": "da", "mtp": "1", "depth": "0", "arena": "tight"},
    pytest.param({"mtp": "2", "depth": "1", "graphs": "few"}, marks=pytest.mark.long),
)


@pytest.fixture(autouse=True)
def _no_numbers(monkeypatch: pytest.MonkeyPatch):
    """Behind the token BAD."""
    model = engines.model(FAMILY, "cuda")
    embedding = model._embedding.clone()
    embedding[BAD] = math.nan
    monkeypatch.setattr(model, "_embedding", embedding)


def answers(eng: Engine, wishes) -> list[Request]:
    requests = [eng.add(prompt, sampling) for prompt, sampling in wishes]
    while not eng.is_idle:
        eng.step()
        eng.check()
    eng.offload.drain()
    assert eng.offload.stats().used_slot_count.sum() == 0
    eng.offload.close()
    return requests


@pytest.mark.parametrize("case", CASES)
def test_it_ends_with_a_reason_and_the_others_say_what_they_would(case):
    wanted = answers(engines.engine("cuda", **case), PLAIN)
    first, *said, last = answers(engines.engine("cuda", **case), (BROKEN[0], *PLAIN, BROKEN[1]))
    assert [request.output for request in said] == [request.output for request in wanted]
    for request in (first, last):
        assert (request.reason, request.output) == ("failed", [])
        assert request.fault == f"the logits behind {len(request.prompt)} tokens are no numbers"
