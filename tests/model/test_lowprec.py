"""Low precision against our own fp32 on a random checkpoint, where nothing has margins.

Random weights bound only the damage (mean KL at most 0.05); trained weights are held to more.
"""

from __future__ import annotations

import pytest
import torch

from ess.models.plain import Plain
from ess.models.precision import Precision, as_stored
from ess.models.registry import build, read_config
from tests.support import checkpoints

KL_MAX = 0.05
STORED = as_stored(read_config(checkpoints.V32).layout())
LOW = {
    "fp8 rows": Precision(rows=STORED.rows),
    "fp8 indexer": Precision(index=STORED.index),
    "both": STORED,
}


@pytest.fixture(scope="module")
def exact() -> torch.Tensor:
    return Plain(checkpoints.model(checkpoints.V32)).run(_tokens()).logits


def _tokens() -> list[int]:
    return checkpoints.tokens(256, 512, seed=5)


@pytest.mark.parametrize("name", sorted(LOW))
def test_fp8_stays_close(exact: torch.Tensor, name: str) -> None:
    logits = Plain(checkpoints.model(checkpoints.V32), precision=LOW[name]).run(_tokens()).logits
    check(name, exact, logits)


def test_bf16_weights_stay_close(exact: torch.Tensor) -> None:
    config = checkpoints.model(checkpoints.V32).config
    weights = {name: w.bfloat16() for name, w in checkpoints.tensors(config).items()}
    check("bf16 weights", exact, Plain(build(config, weights.__getitem__)).run(_tokens()).logits)


def check(name: str, exact: torch.Tensor, logits: torch.Tensor) -> None:
    kl = mean_kl(exact, logits)
    agreement = (exact.argmax(-1) == logits.argmax(-1)).float().mean().item()
    print(f"{name}: mean KL {kl:.2e}, argmax agreement {agreement:.1%}")
    assert logits.isfinite().all()
    assert 1e-6 < kl < KL_MAX, name
    assert agreement > 0.5, name


def mean_kl(exact: torch.Tensor, other: torch.Tensor) -> float:
    p, q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_the_f32_layout_changes_nothing(exact: torch.Tensor) -> None:
    layout = read_config(checkpoints.V32).layout(row="f32", index="f32")
    model = checkpoints.model(checkpoints.V32)
    assert torch.equal(Plain(model, precision=as_stored(layout)).run(_tokens()).logits, exact)
