"""Draws against a sorted, float64 definition of what they mean, and against themselves."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ess.engine.tokens.draw import NOT_A_NUMBER, best, draw, noise_keys
from ess.engine.tokens.sampling import Sampling
from ess.kernels.reference.noise import gumbel


def one(logits, sampling: Sampling, position: int = 1) -> int:
    return int(draw(torch.as_tensor(logits)[None], [sampling], [position])[0])


def shares(logits: list[float], draw_count: int = 4000, **wishes) -> Tensor:
    sampling = Sampling(**{"temperature": 1.0, "seed": 7, **wishes})
    rows = torch.tensor(logits).expand(draw_count, -1)
    drawn = draw(rows, [sampling] * draw_count, range(1, draw_count + 1))
    return torch.bincount(drawn, minlength=len(logits)) / draw_count


def allowed_by_definition(scaled: Tensor, sampling: Sampling) -> set[int]:
    """Top-k, then top-p of the remaining tokens, then min-p of the remaining tokens, one token at a
    time."""
    values, chances = scaled.tolist(), scaled.double().softmax(-1).tolist()
    kept = sorted(range(len(values)), key=lambda i: (-values[i], i))[: sampling.top_k or None]
    mass, summed, nucleus = sum(chances[i] for i in kept), 0.0, []
    for i in kept:
        if nucleus and sampling.top_p < 1 and summed >= sampling.top_p * mass:
            break
        nucleus.append(i)
        summed += chances[i]
    floor = sampling.min_p * chances[nucleus[0]]
    return {i for i in nucleus if chances[i] >= floor}


def test_without_temperature_it_is_the_argmax_lowest_first():
    assert one([1.0, 3.0, 3.0, 2.0], Sampling()) == 1
    assert one([1.0, 3.0, 3.0, 2.0], Sampling(temperature=1e-6, top_p=0.1)) == 1


def test_draws_follow_the_softmax_under_temperature():
    logits = [0.0, 1.0, 2.0, -1.0]
    for temperature in (0.5, 1.0, 3.0):
        expected = (torch.tensor(logits) / temperature).softmax(0)
        assert torch.allclose(shares(logits, temperature=temperature), expected, atol=0.03)
    assert torch.allclose(shares(logits, top_k=4), torch.tensor(logits).softmax(0), atol=0.03)


def test_the_noise_is_gumbel_and_unlike_for_unlike():
    noise = gumbel(noise_keys([3] * 40, range(40)), torch.arange(2000))
    assert noise.isfinite().all()
    assert abs(noise.mean().item() - 0.5772) < 0.03
    assert abs(noise.std().item() - math.pi / 6**0.5) < 0.03
    uniform = (-(-noise).exp()).exp()
    counts = torch.histc(uniform, 100, 0, 1)
    assert float(((counts - 800) ** 2 / 800).sum()) < 160, "chi-square of 99 degrees"
    crossed = torch.corrcoef(noise) - torch.eye(40)
    assert crossed.abs().max() < 0.12
    assert torch.corrcoef(noise.T[:200]).fill_diagonal_(0).abs().mean() < 0.16
    halves = torch.tensor([[5, 77], [5, 1540483477], [6, 77]], dtype=torch.int32)
    alike = torch.corrcoef(gumbel(halves, torch.arange(2000))) - torch.eye(3)
    assert alike.abs().max() < 0.12, "both halves of a key count"
    keys = noise_keys([seed for seed in range(-50, 50) for _ in range(100)], [*range(100)] * 100)
    assert len(keys.unique(dim=0)) == 10_000


def test_every_seed_of_64_bits_has_its_own_noise():
    seeds = [0, 1, -1, 1 << 40, (1 << 64) - 2, -(1 << 63), (1 << 63) - 1]
    assert len(noise_keys(seeds, [5] * len(seeds)).unique(dim=0)) == len(seeds)
    assert noise_keys([-1], [5]).equal(noise_keys([(1 << 64) - 1], [5]))


def test_a_draw_depends_on_seed_and_position_alone():
    logits = torch.zeros(30, 1000)
    first, other = (
        draw(logits, [Sampling(temperature=1.0, seed=seed)] * 30, range(30)) for seed in (1, 2)
    )
    assert len(first.unique()) > 20
    assert int((first == other).sum()) < 3


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    vocabulary=st.sampled_from([5, 300, 1100, 6000]),
    step=st.sampled_from([0.0, 0.25, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 130, 700, 9000]),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 1.0]),
)
def test_filters_keep_what_their_definition_keeps(seed, vocabulary, step, top_k, top_p, min_p):
    """A step rounds the logits, so that equal ones stand at the cuts."""
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 3
    logits = torch.round(logits / step) * step if step else logits
    sampling = Sampling(temperature=1.5, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    allowed = allowed_by_definition(logits / 1.5, sampling)
    positions = range(12)
    noise = gumbel(noise_keys([seed] * 12, positions), torch.arange(vocabulary))
    outside = torch.tensor([i not in allowed for i in range(vocabulary)])
    expected = (logits / 1.5 + noise).masked_fill(outside, -torch.inf).argmax(-1)
    drawn = draw(logits.expand(12, -1), [sampling] * 12, positions)
    assert drawn.tolist() == expected.tolist() or near_a_cut(logits / 1.5, sampling)


def near_a_cut(scaled: Tensor, sampling: Sampling) -> bool:
    """Float32 sums may fall on the other side of a top-p that float64 sums just meet."""
    low, high = (
        allowed_by_definition(
            scaled,
            Sampling(
                top_k=sampling.top_k,
                top_p=sampling.top_p if sampling.top_p == 1 else sampling.top_p * (1 + e),
                min_p=min(1.0, sampling.min_p * (1 + e)),
            ),
        )
        for e in (-1e-5, 1e-5)
    )
    return low != high


def test_what_is_masked_is_never_drawn_and_rows_may_have_few_candidates():
    logits = torch.full((1, 5000), -torch.inf)
    logits[0, [7, 4000]] = torch.tensor([1.0, 0.0])
    for wishes in ({}, {"top_p": 0.999}, {"top_k": 50}, {"min_p": 0.001}):
        sampling = Sampling(temperature=1.0, **wishes)
        drawn = draw(logits.expand(60, -1), [sampling] * 60, range(60))
        assert set(drawn.tolist()) == {7, 4000}, wishes


def test_noise_of_no_seed_does_not_depend_on_the_tests_before():
    assert torch.initial_seed() == 0


def test_the_order_is_by_value_then_by_id_for_every_reach():
    scores = torch.randint(0, 40, (3, 1000)).float()
    whole = scores.sort(dim=-1, descending=True, stable=True)
    assert best(scores, 1000)[1].equal(whole.indices)
    values, ids = best(scores, 300)
    assert values.equal(whole.values[:, :300])
    above = values > values[:, -1:]
    assert ids[above].equal(whole.indices[:, :300][above])


@pytest.mark.parametrize("thread_count", [1, 2])
@pytest.mark.parametrize("vocabulary", [1021, 4096, 20_009])
def test_a_draw_is_bitwise_the_same_whatever_stands_beside_it(vocabulary, thread_count):
    """Not only the tokens: the noise and the chances that they are drawn by, bit by bit."""
    torch.set_num_threads(thread_count)
    wishes = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.95},
        {"temperature": 0.7, "top_p": 0.95, "top_k": 40},
        {"temperature": 1.3, "min_p": 0.02},
        {"temperature": 2.0, "top_p": 0.999},
        {"temperature": 1.0, "top_k": 600},
    ]
    samplings = [Sampling(seed=i, **wishes[i % 7]) for i in range(33)]
    logits = torch.randn(33, vocabulary, generator=torch.Generator().manual_seed(3)) * 2
    crowd = draw(logits, samplings, range(33)).tolist()
    for some in ([0], [1], [2], [3], [4, 5], [6, 20, 31], list(range(32, 7, -1))):
        drawn = draw(logits[some].contiguous(), [samplings[i] for i in some], [*map(int, some)])
        assert drawn.tolist() == [crowd[i] for i in some]
    noise = gumbel(noise_keys(range(33), range(33)), torch.arange(vocabulary))
    for row in (0, 13, 32):
        alone = gumbel(noise_keys([row], [row]), torch.arange(vocabulary))
        assert alone[0].equal(noise[row])
        some = torch.arange(row, vocabulary, 7)
        assert gumbel(noise_keys([row], [row]), some[None])[0].equal(noise[row, some])
    chances = logits.softmax(-1)
    assert all(logits[i : i + 1].softmax(-1)[0].equal(chances[i]) for i in range(33))


def test_logits_stay_and_nothing_is_drawn_from_those_that_are_no_numbers():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    for wishes in ({}, {"top_k": 2}, {"min_p": 0.9}):
        draw(logits, [Sampling(temperature=0.7, **wishes)], [4])
    assert logits.tolist() == [[2.0, 1.0, 0.0]]
    for wishes in ({}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 2}):
        none = torch.tensor([[0.0, math.nan, 1.0], [0.0, 9.0, 1.0]])
        assert draw(none, [Sampling(**wishes)] * 2, [0, 1]).tolist() == [NOT_A_NUMBER, 1]
