from __future__ import annotations

import math

import pytest
import torch

from ess.engine.sampling import Sampling, draw, gumbel
from ess.errors import BadInput


def pick(logits, sampling, *, tokens=(0,), prompt_count=1) -> int:
    return draw(torch.tensor(logits), sampling, tokens=list(tokens), prompt_count=prompt_count)


def counts(logits, draw_count: int = 4000, **settings) -> torch.Tensor:
    sampling = Sampling(temperature=1.0, seed=7, **settings)
    row = torch.tensor(logits)
    drawn = [draw(row, sampling, tokens=[0] * (1 + i), prompt_count=1) for i in range(draw_count)]
    return torch.bincount(torch.tensor(drawn), minlength=len(logits)) / draw_count


def test_without_temperature_it_is_the_argmax_lowest_first():
    assert pick([1.0, 3.0, 3.0, 2.0], Sampling()) == 1


def test_draws_follow_the_softmax():
    logits = [0.0, 1.0, 2.0, -1.0]
    share = counts(logits)
    assert torch.allclose(share, torch.tensor(logits).softmax(0), atol=0.03)


def test_a_draw_depends_on_seed_and_position_alone():
    logits = torch.zeros(1000)
    one, two = Sampling(temperature=1.0, seed=1), Sampling(temperature=1.0, seed=2)
    first = [draw(logits, one, tokens=[0] * n, prompt_count=1) for n in range(1, 30)]
    again = [draw(logits, one, tokens=[5] * n, prompt_count=1) for n in range(1, 30)]
    other = [draw(logits, two, tokens=[0] * n, prompt_count=1) for n in range(1, 30)]
    assert first == again
    assert len(set(first)) > 20
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 3


def test_the_noise_is_gumbel():
    noise = torch.cat([gumbel(3, position, 2000) for position in range(20)])
    assert noise.isfinite().all()
    assert abs(noise.mean().item() - 0.5772) < 0.03
    assert abs(noise.std().item() - math.pi / 6**0.5) < 0.03


def test_top_k_top_p_and_min_p_leave_the_best():
    logits = [3.0, 2.0, 1.0, 0.0]
    assert (counts(logits, 300, top_k=2) > 0).tolist() == [True, True, False, False]
    assert (counts(logits, 300, top_p=0.5) > 0).tolist() == [True, False, False, False]
    assert (counts(logits, 300, top_p=0.7) > 0).tolist() == [True, True, False, False]
    assert (counts(logits, 300, min_p=0.2) > 0).tolist() == [True, True, False, False]
    assert (counts(logits, 300, min_p=1.0) > 0).tolist() == [True, False, False, False]


def test_penalties_bias_and_the_least_length():
    assert pick([2.0, 1.9], Sampling(presence_penalty=0.2), tokens=[1, 0]) == 1
    assert pick([2.0, 1.7], Sampling(frequency_penalty=0.2), tokens=[1, 0]) == 0
    assert pick([2.0, 1.7], Sampling(frequency_penalty=0.2), tokens=[1, 0, 0]) == 1
    assert pick([2.0, 1.5], Sampling(repetition_penalty=2.0), tokens=[0]) == 1
    assert pick([-1.0, -1.5], Sampling(repetition_penalty=2.0), tokens=[0]) == 1
    assert pick([0.0, 0.0], Sampling(logit_bias={1: 1.0})) == 1
    short = Sampling(tokens_min=2, stop_ids=frozenset({0}))
    assert pick([9.0, 1.0], short, tokens=[1, 1], prompt_count=1) == 1
    assert pick([9.0, 1.0], short, tokens=[1, 1, 1], prompt_count=1) == 0


def test_the_caller_s_logits_stay_as_they_are():
    logits = torch.tensor([2.0, 1.0, 0.0])
    sampling = Sampling(temperature=0.7, top_k=1, logit_bias={2: 5.0}, presence_penalty=1.0)
    draw(logits, sampling, tokens=[1, 1], prompt_count=1)
    assert logits.tolist() == [2.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 2.0},
        {"tokens_max": 0},
        {"tokens_min": 200},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.nan},
    ],
)
def test_settings_out_of_range_name_themselves(bad):
    with pytest.raises(BadInput, match="must be"):
        Sampling(**bad)
