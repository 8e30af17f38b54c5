"""An answer that another engine has begun continues as if that engine had not died."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ess.engine.requests.request import Request
from ess.engine.tokens.chance import Chance
from ess.engine.tokens.grammar import Grammar
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from tests.model.test_answers import DATE, engine, ids, said

LETTERS = Grammar("regex", "[a-z]{3}( [a-z]{2,5}){4}")
WISHES = [
    Sampling(tokens_max=12, ignore_eos=True, logprobs=2),
    Sampling(tokens_max=12, ignore_eos=True, temperature=1.0, seed=7, top_p=0.9),
    Sampling(
        tokens_max=12,
        temperature=1.2,
        seed=3,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.7,
        tokens_min=9,
    ),
    Sampling(tokens_max=12, grammar=DATE, temperature=2.0, seed=1),
    Sampling(tokens_max=30, grammar=LETTERS, temperature=1.0, seed=2),
    Sampling(tokens_max=12, bad_words=(tuple(ids(" the module")),), ignore_eos=True),
]


def made(
    wishes: list[Sampling], begun: list[list[int]], **config: object
) -> tuple[list[Request], list[list[Chance]]]:
    """The requests at their ends, and the chances of what this engine has made of them."""
    eng = engine(**config)
    prompt = ids("The module named") * 30
    requests = [
        eng.add(prompt, wish, prior_output=tokens)
        for wish, tokens in zip(wishes, begun, strict=True)
    ]
    chances: list[list[Chance]] = [[] for _ in requests]
    for result in eng.run():
        eng.check()
        for each in result.made:
            chances[requests.index(each.request)] += each.chances
    eng.offload.close()
    eng.close()
    return requests, chances


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        {},
        pytest.param({"mtp": 3, "chunk_tokens": 64}, marks=pytest.mark.long),
        pytest.param({"mode": "da", "depth": 1}, marks=pytest.mark.long),
    ],
)
def test_an_answer_goes_on_behind_what_was_said(config: dict):
    [free], _ = made(WISHES[:1], [[]], **config)
    stop = said(free)[-12:-6]
    wishes = [*WISHES, replace(WISHES[0], stop=(stop,))]
    whole, whole_chances = made(wishes, [[] for _ in wishes], **config)
    assert whole[-1].ended_by == stop
    for share in (0.4, 1.0):
        counts = [int(share * (len(request.output) - 1)) for request in whole]
        begun = [request.output[:count] for request, count in zip(whole, counts, strict=True)]
        requests, chances = made(wishes, begun, **config)
        for expected, request in zip(whole, requests, strict=True):
            assert request.output == expected.output
            assert (request.reason, request.ended_by) == (expected.reason, expected.ended_by)
        tokens = [chance.rank for chance in chances[0]]
        assert tokens == [chance.rank for chance in whole_chances[0][counts[0] :]]


def test_what_has_ended_or_is_no_token_does_not_go_on():
    eng = engine()
    prompt = ids("The module named")
    for wish, tokens, why in (
        (Sampling(tokens_max=3), [5, 6, 7], "which end the answer"),
        (Sampling(tokens_max=3), [5, 6, 7, 8], "which end the answer"),
        (Sampling(stop_ids=frozenset({6})), [5, 6], "which end the answer"),
        (Sampling(prompt_logprobs=1), [5], "prompt_logprobs"),
        (Sampling(), [1 << 30], "prior_output ids must be"),
    ):
        with pytest.raises(BadInput, match=why):
            eng.add(prompt, wish, prior_output=tokens)
    assert eng.is_idle
    eng.offload.close()
