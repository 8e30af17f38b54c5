"""What a request takes from a step, against the rules written down one token at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ess.engine.plan import Feed
from ess.engine.requests.request import Request
from ess.engine.tokens.counts import Tally
from ess.engine.tokens.draw import draw
from ess.engine.tokens.grammar import Grammar
from ess.engine.tokens.logprobs import chances
from ess.engine.tokens.sampling import Sampling
from ess.engine.tokens.verification import Choice, choose_all

WISHES = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 3},
    {"temperature": 1.0, "presence_penalty": 0.8, "frequency_penalty": -0.3},
    {"repetition_penalty": 1.4},
    {"temperature": 0.9, "repetition_penalty": 0.7, "logit_bias": {0: 2.0, 5: -100.0}},
    {"tokens_min": 3, "logit_bias": {1: 4.0}},
    {"temperature": 1.0, "allowed_ids": frozenset({2, 4, 6}), "logprobs": 1},
    {"temperature": 1.2, "bad_words": ((3,), (4, 5), (5, 5), (6, 7, 8), (6, 8))},
    {"allowed_ids": frozenset({3, 4, 5}), "bad_words": ((3, 3), (4, 4), (3, 4), (4, 5))},
)


def asked(prompt=(0,), output=(), ends=(), number=0, **wishes) -> Request:
    request = Request(number=number, prompt=list(prompt), sampling=Sampling(**wishes))
    request.output = list(output)
    request.ends = frozenset(ends)
    return request


def feed_of(request: Request, *tokens: int) -> Feed:
    return Feed(request, tokens, len(request.tokens) - 1)


def choose(feed: Feed, logits: Tensor) -> Choice:
    return choose_all([feed], logits)[0]


def pick(logits: list[float], **given) -> int:
    request = asked(**given)
    return choose(feed_of(request, request.tokens[-1]), torch.tensor([logits])).tokens[0]


def changed_by_definition(logits: Tensor, request: Request, output: list[int]) -> Tensor:
    sampling, changed = request.sampling, logits.clone()
    for token in set(request.prompt + output):
        score, penalty = changed[token], sampling.repetition_penalty
        changed[token] = score / penalty if score > 0 else score * penalty
    for token in set(output):
        said = torch.tensor(float(output.count(token)))
        changed[token] -= sampling.frequency_penalty * said + sampling.presence_penalty
    for token, bias in sampling.logit_bias.items():
        changed[token] += bias
    for token in range(len(changed)):
        if sampling.allowed_ids is not None and token not in sampling.allowed_ids:
            changed[token] = -torch.inf
        if any(tuple([*output, token][-len(word) :]) == word for word in sampling.bad_words):
            changed[token] = -torch.inf
    if len(output) < sampling.tokens_min:
        changed[sorted(request.ends)] = -torch.inf
    return changed


def choose_by_definition(feed: Feed, logits: Tensor) -> list[int]:
    made: list[int] = []
    for query, row in enumerate(logits):
        output = feed.request.output + made
        changed = changed_by_definition(row, feed.request, output)
        position = len(feed.request.prompt) + len(output)
        made.append(int(draw(changed[None], [feed.request.sampling], [position])[0]))
        if feed.tokens[query + 1 : query + 2] != (made[-1],):
            return made
    return made


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1 << 30), right=st.lists(st.booleans(), min_size=6, max_size=6))
def test_a_batch_with_drafts_gives_what_one_token_at_a_time_gives(seed, right):
    """Drafts are right or wrong at random; requests grow over three steps, so tallies follow."""
    generator = torch.Generator().manual_seed(seed)
    requests = [
        asked(
            torch.randint(9, (4,), generator=generator).tolist(), (), {1}, i, seed=seed + i, **wish
        )
        for i, wish in enumerate(WISHES)
    ]
    for step in range(3):
        rows = torch.randn(len(requests), 4, 9, generator=generator) * 2
        feeds = []
        for request, logits in zip(requests, rows, strict=True):
            feed = feed_of(request, request.tokens[-1])
            for query in range(3):
                wanted = choose_by_definition(feed, logits[: query + 1])[-1]
                draft = wanted if right[(query + step) % 6] else (wanted + 1) % 9
                feed = feed_of(request, *feed.tokens, draft)
            feeds.append(feed)
        before = rows.clone()
        choices = choose_all(feeds, rows.flatten(0, 1))
        assert rows.equal(before), "the caller's logits stay as they are"
        for feed, logits, choice in zip(feeds, rows, choices, strict=True):
            assert list(choice.tokens) == choose_by_definition(feed, logits)
            assert choice == choose(feed, logits), "alone it is the same"
            feed.request.output.extend(choice.tokens)


def test_penalties_bias_and_the_least_length():
    assert pick([2.0, 1.9], prompt=[1], output=[0], presence_penalty=0.2) == 1
    assert pick([2.0, 1.7], prompt=[1], output=[0], frequency_penalty=0.2) == 0
    assert pick([2.0, 1.7], prompt=[1], output=[0, 0], frequency_penalty=0.2) == 1
    assert pick([2.0, 1.5], prompt=[0], repetition_penalty=2.0) == 1
    assert pick([-1.0, -1.5], prompt=[0], repetition_penalty=2.0) == 1
    assert pick([0.0, 0.0], logit_bias={1: 1.0}) == 1
    assert pick([9.0, 1.0], output=[1], ends={0}, tokens_min=2) == 1
    assert pick([9.0, 1.0], output=[1, 1], ends={0}, tokens_min=2) == 0


def test_where_nothing_is_left_the_allowed_ids_win():
    stuck = {"allowed_ids": frozenset({0, 2}), "bad_words": ((2,), (2, 0))}
    assert pick([9.0, 5.0, 1.0], prompt=[1], output=[1], **stuck) == 0
    assert pick([9.0, 8.0, 1.0], prompt=[1], output=[2], **stuck) in (0, 2)
    assert pick([9.0, 8.0, 1.0], ends={0, 2}, tokens_min=2, allowed_ids=frozenset({2})) == 2


def test_no_query_behind_the_last_mask_counts():
    """The draft is what is drawn, but the matcher did not follow it: it ends the text."""
    request = asked([4], ends={1}, grammar=Grammar("regex", "x"))
    request.matcher = OnlyTheEnd()
    logits = torch.zeros(3, 9)
    assert choose(feed_of(request, 4, 1, 0), logits).tokens == (1,)


class OnlyTheEnd:
    failure = ""

    def allowed(self, output, drafts):
        return np.arange(9)[None] == 1


def test_a_tally_counts_ahead_without_entering_and_follows_without_looking_back():
    tally = Tally([7, 3, 7])
    tally.follow([3, 9])
    ahead = tally.ahead([9, 4, 4])
    places = {token: place for place, token in enumerate(ahead.ids.tolist())}
    assert set(places) == {3, 4, 7, 9}
    assert ahead.times[:, places[9]].tolist() == [1, 2, 2, 2]
    assert ahead.times[:, places[4]].tolist() == [0, 0, 1, 2]
    assert ahead.seen[:, places[4]].tolist() == [False, False, True, True]
    assert ahead.times[:, places[7]].tolist() == [0] * 4
    output = Counted(range(100, 400))
    output[:2] = [3, 9]
    tally.follow(output)
    output.read_count = 0
    output.append(5)
    tally.follow(output)
    assert output.read_count == 0, "the past is skipped, not entered again"
    again = tally.ahead([])
    assert again.times.sum() == len(output)
    assert sorted(again.ids.tolist()) == sorted({3, 7, 9, 5, *range(102, 400)})


class Counted(list):
    read_count = 0

    def __iter__(self):
        for token in super().__iter__():
            self.read_count += 1
            yield token


@pytest.mark.parametrize("count", [0, 1, 4, 20])
def test_chances_are_of_the_model_s_own_distribution(count):
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1)) * 2
    request = asked([4], (), temperature=0.3, top_k=2, logit_bias={9: 100.0}, logprobs=count)
    [token, *rest] = choose(feed_of(request, 4), logits[:1]).tokens
    assert (token, rest) == (9, []), "the bias decides what is drawn"
    [chance] = choose(feed_of(request, 4), logits[:1]).chances
    scores = logits[0].double().log_softmax(0)
    assert math.isclose(chance.logprob, scores[9], rel_tol=1e-5), "and not how likely it was"
    assert chance.rank == 1 + int((logits[0] > logits[0, 9]).sum())
    expected = scores.sort(descending=True)
    assert [token for token, _ in chance.top] == expected.indices[:count].tolist()
    assert torch.allclose(
        torch.tensor([score for _, score in chance.top]), expected.values[:count].float(), atol=1e-5
    )


def test_chances_break_ties_by_id_and_come_with_every_accepted_token():
    logits = torch.zeros(3, 300)
    logits[:, 7] = torch.tensor([1.0, 1.0, 1.0])
    listed = chances(logits, [7, 299, 0], 20)
    assert [each.rank for each in listed] == [1, 2, 2]
    assert [token for token, _ in listed[0].top] == [7, 0, 1, 2, 3, 4, 5, 6, *range(8, 20)]
    assert len(chances(logits[:1, :5], [3], 20)[0].top) == 5
    request = asked([4], logprobs=0)
    assert len(choose(feed_of(request, 4, 7, 8), logits).chances) == 2
    assert choose(feed_of(asked([4]), 4, 7, 8), logits).chances == ()
