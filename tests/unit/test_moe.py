"""Routing and the grouped evaluation of experts against loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ess.models.layers import Source
from ess.models.moe import Moe, Routing
from ess.models.registry import read_config
from tests.support import checkpoints

PREFIX = "model.layers.2.mlp"


def make(dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Moe, dict[str, torch.Tensor]]:
    config = read_config({**checkpoints.TINY_V32, **changes})
    weights = {k: v.to(dtype) for k, v in checkpoints.tensors(config).items()}
    weights = {k.removeprefix(PREFIX + "."): v for k, v in weights.items() if PREFIX in k}
    return Moe(config, Source(weights.__getitem__)), weights


def one_expert(weights: dict[str, torch.Tensor], number: int, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = (
        weights[f"experts.{number}.{name}_proj.weight"] for name in ("gate", "up", "down")
    )
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("token_count", [1, 2, 33])
def test_grouped_experts_equal_a_loop(dtype: torch.dtype, token_count: int) -> None:
    moe, weights = make(dtype)
    x = torch.randn(token_count, 64, generator=torch.Generator().manual_seed(token_count)).to(dtype)
    routing = moe.route(x)
    routed = moe.routed(x, routing)
    for token in range(token_count):
        pairs = zip(routing.experts[token].tolist(), routing.weights[token], strict=True)
        expected = sum(w * one_expert(weights, e, x[token]).float() for e, w in pairs)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert torch.allclose(routed[token].float(), expected, atol=tolerance, rtol=tolerance)


def test_all_tokens_on_one_expert() -> None:
    moe, weights = make()
    x = torch.randn(5, 64)
    routing = Routing(torch.tensor([[3, 4]] * 5), torch.tensor([[1.0, 0.0]] * 5))
    assert torch.allclose(moe.routed(x, routing), one_expert(weights, 3, x), atol=1e-5)


def test_a_token_is_routed_alike_alone_and_in_company() -> None:
    moe, _ = make()
    x = torch.randn(32, 64)
    together = moe(x)
    for token in range(32):
        alone = moe.route(x[token : token + 1])
        assert torch.equal(alone.experts[0], moe.route(x).experts[token])
        assert torch.allclose(moe(x[token : token + 1])[0], together[token], atol=1e-5)


def test_groups_limit_the_choice_and_the_bias_only_steers() -> None:
    """8 experts in 4 groups, 2 kept: hand-made scores where group sums overrule single scores."""
    moe, _ = make()
    logits = torch.tensor([3.0, -9.0, 2.0, 2.0, 1.0, 1.5, -9.0, -9.0])
    moe._gate = torch.zeros(8, 64)
    moe._gate[:, 0] = logits
    moe._correction = torch.zeros(8)
    x = F.one_hot(torch.tensor([0]), 64).float()
    routing = moe.route(x)
    assert routing.experts.tolist() == [[2, 3]], "expert 0 is best, but its group is not"
    assert torch.allclose(routing.weights, torch.tensor([[1.25, 1.25]]))
    moe._correction[0] = 5.0
    routing = moe.route(x)
    assert routing.experts.tolist() == [[0, 2]], "ties go to the lowest expert"
    share = torch.sigmoid(logits[[0, 2]])
    assert torch.allclose(routing.weights[0], 2.5 * share / share.sum())
