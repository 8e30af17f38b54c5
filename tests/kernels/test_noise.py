"""Tokens drawn by noise: by their definition, by torch, by a kernel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ess.kernels.calls import Cuts, Draws
from ess.kernels.cut import draw
from ess.kernels.reference.noise import gumbel, mixed_keys
from tests.kernels.sets import SETS, op_set
from tests.kernels.test_cut import cuts_of
from tests.kernels.test_triton_ops import device

COUNT, WIDTH = 24, 700


def draws_of(count: int, *, top_k: int = WIDTH) -> Draws:
    seeds = torch.arange(count) * 0x9E3779B97F4A7C1 - (1 << 62)
    return Draws(torch.full((count,), top_k), seeds, torch.arange(count) * 31 + 1)


def defined(seed: int, position: int, token: int) -> float:
    """The noise of a token, in whole numbers without a sign up to its share, then in float64."""
    low, lowest, key = (1 << 64) - 1, (1 << 32) - 1, seed
    for added in (0, position):
        key = key + added & low
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & low
        key = (key ^ key >> 27) * 0x94D049BB133111EB & low
        key ^= key >> 31
    mixed = token * 0x9E3779B9 & lowest ^ key & lowest
    mixed = (mixed ^ mixed >> 16) * 0x7FEB352D + (key >> 32) & lowest
    mixed = (mixed ^ mixed >> 15) * 0x846CA68B & lowest
    mixed = (mixed ^ mixed >> 16) & 0x7FFFFFFF
    share = float(torch.tensor(mixed).float().add(0.5)) * (1.0 - 2.0**-23) / 2.0**31
    return -math.log(-math.log1p(-share))


def test_noise_is_that_of_its_definition() -> None:
    """So a seed says the same in all versions. Lines of greedy requests keep their tokens."""
    draws, width = draws_of(COUNT), 40
    noise = gumbel(mixed_keys(draws.seeds, draws.positions), torch.arange(width))
    lines = zip(draws.seeds.tolist(), draws.positions.tolist(), strict=True)
    wanted = [
        [defined(seed, position, token) for token in range(width)] for seed, position in lines
    ]
    torch.testing.assert_close(noise, torch.tensor(wanted), rtol=1e-5, atol=1e-5)
    scores = torch.randn(COUNT, width, generator=torch.Generator().manual_seed(2))
    draws.top_k[::5], draws.top_k[1::5] = 0, 1
    tokens = torch.full((COUNT,), -7)
    draw(scores, draws, tokens)
    assert tokens.equal(torch.where(draws.top_k > 0, (scores + noise).argmax(-1), -7))


@pytest.fixture(params=SETS[2:])
def by_kernel(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("triton", reason="triton is not installed")
    op_set(request.param)
    from ess.kernels.cuda.triton.noise import draw_into as launch

    def run(scores: torch.Tensor, draws: Draws, tokens: torch.Tensor) -> torch.Tensor:
        given = Draws(*(part.to(device()) for part in draws))
        there = tokens.to(device())
        launch(scores.to(device()), given, there, block=256)
        return there.cpu()

    return run


@pytest.mark.parametrize("by", [1e-5, -1e-5])
def test_noise_is_right_to_its_last_digits(by_kernel: Any, by: float) -> None:
    """Of two tokens, one of which has the most noise of its line, the lead decides."""
    draws, lines = draws_of(COUNT), torch.arange(COUNT)
    noise = gumbel(mixed_keys(draws.seeds, draws.positions), torch.arange(WIDTH)).double()
    most, other = noise.argmax(-1), (noise.argmax(-1) + 1 + 7 * lines) % WIDTH
    scores = torch.full((COUNT, WIDTH), -math.inf)
    scores[lines, most] = (noise[lines, other] - noise[lines, most] + by).float()
    scores[lines, other] = 0.0
    made = by_kernel(scores, draws, torch.full((COUNT,), -7))
    assert made.tolist() == (most if by > 0 else other).tolist()


def test_draws_are_those_of_the_reference(by_kernel: Any) -> None:
    """Lines of greedy requests keep their tokens, the first of equals is drawn, and NaN before all
    else."""
    draws = draws_of(COUNT)
    draws.top_k[::5] = 0
    scores = torch.randn(COUNT, WIDTH, generator=torch.Generator().manual_seed(1))
    scores[1, [300, 600]], scores[2, [299, 301]], scores[3] = math.inf, math.nan, -math.inf
    tokens, wanted = torch.full((COUNT,), -7), torch.full((COUNT,), -7)
    draw(scores, draws, wanted)
    assert wanted[:6].tolist()[:4] == [-7, 300, 299, 0]
    assert by_kernel(scores, draws, tokens).equal(wanted)


def test_a_line_of_a_greedy_request_is_not_cut(by_kernel: Any) -> None:
    from ess.kernels.cuda.triton.cut import cut_into

    scores = torch.randn(2, WIDTH).to(device())
    out, cuts = torch.full_like(scores, 7.0), cuts_of(2, (0, 0.5, 0.0))
    cuts.top_k[1] = 1
    cut_into(scores, Cuts(*(part.to(device()) for part in cuts)), out, room=128, block=512)
    assert (out[0] == 7.0).all()
    assert (out[1] > -math.inf).sum() == 1
