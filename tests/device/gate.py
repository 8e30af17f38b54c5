"""The gate of bf16 and fp8 on a device: the model in the box is told a real text, token by token.

Run by `test_forward_steps`. The form that is served, and weights that stay in blocks of fp8, are
held to the bounds that the host is held to; what offload adds, to a fortieth of that.
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
from tests.device import engines
from tests.device.standin import StandIn

SIZES: Final = {300: (1, 8), 2048: (3, 64)}
"""Excerpts of a context, more than the top-k has, and tokens compared behind each."""

KL_MAX, FLIPPED_MAX, LEAD = 0.04, 0.10, 0.25
KL_OF_OFFLOAD = 1e-3


@pytest.fixture(autouse=True)
def alone():
    with engines.alone():
        yield


@functools.cache
def logits(context: int, form: Form, mode: str, device: str, weights: str) -> torch.Tensor:
    count, tokens = SIZES[context]
    lines = excerpts_of(token_ids()[0], context, count=count, tokens=tokens)
    made = load_model(form=weights, device=device)
    with offload_for(load_model(form=form.weights), form, lines) as offload:
        there = offload if device == "cpu" else StandIn(offload)
        eng = Engine(made, there, EngineConfig(modes=mode, backend=device))
        return torch.stack(forced_logits(eng, lines, start=context)).cpu()


def held(context: int, exact: torch.Tensor, ours: torch.Tensor) -> None:
    """Of a few tokens no share is asked: one of them would be too many."""
    found = apart(exact, ours)
    print(f"mean KL {found.mean:.1e}, flipped {found.flipped:.1%}, leads {found.leads}")
    assert 0 < found.mean <= KL_MAX
    assert context == min(SIZES) or found.flipped <= FLIPPED_MAX
    assert sum(lead > LEAD for lead in found.leads) <= 1


@pytest.mark.parametrize("context", [min(SIZES), pytest.param(max(SIZES), marks=pytest.mark.long)])
@pytest.mark.parametrize("weights", ["bf16", "stored"])
def test_low_precision_is_as_near_as_on_the_host(context: int, weights: str) -> None:
    exact = logits(context, EXACT, "none", "cpu", "f32")
    ours = logits(context, SERVED, "none", "cuda", weights)
    held(context, exact, ours)
    held(context, logits(context, SERVED, "none", "cpu", "bf16"), ours)


@pytest.mark.long
@pytest.mark.parametrize("weights", ["bf16", "stored"])
@pytest.mark.parametrize("mode", ["da", "dba"])
def test_offload_adds_little_to_that(mode: str, weights: str) -> None:
    without, offloaded = (
        logits(max(SIZES), SERVED, way, "cuda", weights) for way in ("none", mode)
    )
    assert apart(without, offloaded).mean <= KL_OF_OFFLOAD
