"""A request of which the model makes no numbers ends alone, and the others never know."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from ess.engine.requests.request import Request
from ess.engine.tokens.sampling import Sampling
from tests.model.test_answers import engine, ids, model

BAD = 4000
GOOD = (
    (ids("The module named"), Sampling(tokens_max=9, ignore_eos=True)),
    (ids("A server is") * 40, Sampling(tokens_max=9, temperature=1.0, seed=3, top_k=40)),
    (ids("Where the"), Sampling(tokens_max=9, repetition_penalty=1.2, stop=("\x00never",))),
)
BROKEN = (
    ([*ids("The module"), BAD, *ids(" named")], Sampling(stop=("\x00never",))),
    ([*ids("A page") * 60, BAD], Sampling(temperature=1.0, top_p=0.9, logprobs=2)),
    ([BAD], Sampling(temperature=0.5, frequency_penalty=0.3)),
)


@pytest.fixture
def _no_numbers() -> Iterator[None]:
    """Behind the token BAD."""
    embedding = model()._embedding
    assert embedding is not None
    before = embedding[BAD].clone()
    embedding[BAD] = math.nan
    yield
    embedding[BAD] = before


def answers(wishes: list[tuple[list[int], Sampling]], **config: object) -> list[Request]:
    eng = engine(**config)
    requests = [eng.add(prompt, sampling) for prompt, sampling in wishes]
    for _ in eng.run():
        eng.check()
    eng.offload.drain()
    assert eng.offload.stats().used_slot_count.sum() == 0
    eng.offload.close()
    return requests


@pytest.mark.usefixtures("_no_numbers")
@pytest.mark.parametrize("config", [{}, {"mtp": 3}, {"mode": "da", "depth": 1}])
def test_it_ends_with_a_reason_and_the_others_say_what_they_would(config: dict):
    expected = answers([*GOOD], **config)
    requests = answers([wish for pair in zip(GOOD, BROKEN, strict=True) for wish in pair], **config)
    assert [(r.reason, r.output) for r in requests[::2]] == [(r.reason, r.output) for r in expected]
    for request in requests[1::2]:
        assert (request.reason, request.output) == ("failed", [])
        assert request.fault == f"the logits behind {len(request.prompt)} tokens are no numbers"
