"""The gate of bf16 and fp8 on a device: the model in the box reads a real text, token by token.

Run by `test_forward_steps`. The form that is served is held to the bounds that the host is held to.
Weights that stay in blocks of fp8 are not within these: their products round values to e4m3 too;
on 3 excerpts of 2,048 tokens that was 0.07 nats from float32 and flipped 15 %, where the served
form has 0.02 and 7 %. They have wider bounds of their own, so that it is seen if that grows.
"""

from __future__ import annotations

import functools
from typing import Final

import pytest
import torch

from ess.bench.engine.precision import (
    EXACT,
    SERVED,
    Form,
    apart,
    excerpts_of,
    forced_logits,
    offload_for,
)
from ess.bench.harness.text import token_ids
from ess.engine.engine import Engine, EngineConfig
from ess.models.load import load_model
from tests.device.standin import StandIn

pytestmark = pytest.mark.usefixtures("alone")

SIZES: Final = {300: (1, 8), 2048: (3, 64)}
"""Excerpts of a context, more than the top-k has, and tokens compared behind each."""

FROM_FLOAT32: Final = {"bf16": (0.04, 0.10), "stored": (0.10, 0.20)}
"""By weights: mean KL in nats, and share of tokens that flip."""

KL_OF_OFFLOAD: Final = 1e-3


@functools.cache
def logits(context: int, form: Form, mode: str, device: str, weights: str) -> torch.Tensor:
    count, tokens = SIZES[context]
    lines = excerpts_of(token_ids()[0], context, count=count, tokens=tokens)
    made = load_model(form=weights, device=device)
    with offload_for(load_model(form=form.weights), form, lines) as offload:
        there = offload if device == "cpu" else StandIn(offload)
        eng = Engine(made, there, EngineConfig(modes=mode, backend=device))
        return torch.stack(forced_logits(eng, lines, start=context)).cpu()


@pytest.mark.parametrize("context", [min(SIZES), pytest.param(max(SIZES), marks=pytest.mark.long)])
@pytest.mark.parametrize("weights", ["bf16", "stored"])
def test_low_precision_is_near_float32_and_near_the_host(context: int, weights: str) -> None:
    """With few tokens no share is allowed to differ: a single one would exceed it."""
    ours = logits(context, SERVED, "none", "cuda", weights)
    kl_max, flipped_max = FROM_FLOAT32[weights]
    for form, given in ((EXACT, "f32"), (SERVED, "bf16")):
        distance = apart(logits(context, form, "none", "cpu", given), ours)
        print(f"from {form.name}: mean KL {distance.mean:.1e}, flipped {distance.flipped:.1%}")
        assert 0 < distance.mean <= kl_max
        assert context == min(SIZES) or distance.flipped <= flipped_max


@pytest.mark.long
@pytest.mark.parametrize("weights", ["bf16", "stored"])
@pytest.mark.parametrize("mode", ["da", "dba"])
def test_offload_adds_little_to_that(mode: str, weights: str) -> None:
    without, offloaded = (
        logits(max(SIZES), SERVED, way, "cuda", weights) for way in ("none", mode)
    )
    assert apart(without, offloaded).mean <= KL_OF_OFFLOAD
