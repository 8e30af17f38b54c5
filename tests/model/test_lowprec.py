"""Low precision against our own fp32 on a random checkpoint, where nothing has margins.

Random weights bound only the damage (mean KL at most 0.05); trained weights are held to more.
"""

from __future__ import annotations

import pytest
import torch
from support import checkpoints
from support.lowprec import fp8_index, fp8_rows, mean_kl

from ess.models.plain import Plain, Precision
from ess.models.registry import build

KL_MAX = 0.05
LOW = {
    "fp8 rows": Precision(rows=fp8_rows),
    "fp8 indexer": Precision(index=fp8_index),
    "both": Precision(rows=fp8_rows, index=fp8_index),
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
