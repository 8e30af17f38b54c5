"""The gate of bf16 and fp8, on real text: how far from float32, and what offload adds to that.

`ess-bench precision --ctx 2k,8k,32k` prints these figures again, and longer ones. The lead of a
token that flips has no bound: a difference in the last bit may turn a near tie of the router or of
the indexer. What is held is the mean KL, the share of tokens that flip, and how many of them were
ahead by more than `LEAD`.
"""

from __future__ import annotations

import functools

import pytest

from ess.bench.engine.precision import (
    EXACT,
    FP8,
    SERVED,
    Distance,
    Form,
    Logits,
    apart,
    excerpts_of,
    read,
)
from ess.bench.harness.text import token_ids
from ess.models.load import load_model

pytestmark = pytest.mark.slow
BF16_ROWS = Form(name="bf16 rows, fp8 keys", weights="bf16", row="bf16", index="fp8")
BOTH = ("none", "da", "dba")
SIZES = {2048: (1, 64), 8192: (2, 128)}
"""Excerpts of a context, and tokens compared behind each."""

FROM_FLOAT32 = {2048: (0.04, 0.10), 8192: (0.20, 0.30)}
"""Mean KL in nats, and share of tokens that flip."""

KL_OF_OFFLOAD, FLIPPED_BY_OFFLOAD = 1e-3, 0.01
LEAD = 0.25


@functools.cache
def logits(context: int) -> Logits:
    count, tokens = SIZES[context]
    lines = excerpts_of(token_ids()[0], context, count=count, tokens=tokens)
    models = {"f32": load_model(form="f32"), "bf16": load_model(form="bf16")}
    ways = {EXACT: ("none",), FP8: ("none",), SERVED: BOTH}
    if context == min(SIZES):
        ways[BF16_ROWS] = BOTH
    return read(models, ways, lines, tokens=tokens)


def seen(name: str, distance: Distance) -> Distance:
    leads = " ".join(f"{lead:.2f}" for lead in distance.leads)
    print(
        f"{name}: mean KL {distance.mean:.1e}, flipped {distance.flipped:.1%}, leads {leads or '-'}"
    )
    return distance


@pytest.mark.parametrize("context", [min(SIZES), pytest.param(max(SIZES), marks=pytest.mark.long)])
@pytest.mark.parametrize("form", [FP8, SERVED], ids=lambda form: form.name)
def test_low_precision_is_near_float32(context: int, form: Form) -> None:
    distance = seen(form.name, apart(logits(context)[EXACT, "none"], logits(context)[form, "none"]))
    kl_max, flipped_max = FROM_FLOAT32[context]
    assert 0 < distance.mean <= kl_max
    assert distance.flipped <= flipped_max


@pytest.mark.parametrize("mode", ["da", "dba"])
@pytest.mark.parametrize(
    ("context", "form"),
    [(2048, BF16_ROWS), (2048, SERVED), pytest.param(8192, SERVED, marks=pytest.mark.long)],
    ids=["2k-bf16-rows", "2k-fp8", "8k-fp8"],
)
def test_offload_adds_little_to_that(context: int, form: Form, mode: str) -> None:
    """NONE is bitwise what RESIDENT is (`test_exactness`)."""
    made = logits(context)
    distance = seen(f"{form.name}, {mode}", apart(made[form, "none"], made[form, mode]))
    assert distance.mean <= KL_OF_OFFLOAD
    assert float(distance.kl.median()) <= KL_OF_OFFLOAD / 1000
    assert distance.flipped <= FLIPPED_BY_OFFLOAD
    assert sum(lead > LEAD for lead in distance.leads) <= 1
