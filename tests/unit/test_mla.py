"""The plain attention of the model against the reference kernel."""

from __future__ import annotations

import pytest
import torch

from ess.models import mla
from tests.kernels.sets import plain_attention, reference

LATENT, DIM, SCALE = 16, 24, 0.3


@pytest.fixture
def case() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(9, 3, DIM, generator=generator), torch.randn(30, DIM, generator=generator)


@pytest.mark.parametrize("tile", [1, 400, 1 << 20])
def test_gathered_and_dense_equal_the_reference(
    case: tuple[torch.Tensor, torch.Tensor], tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, rows = case
    monkeypatch.setattr(mla, "GATHER_ELEMENTS", tile)
    positions = torch.arange(21, 30)
    everything = torch.arange(30, dtype=torch.int32).expand(9, 30)
    seen = everything.masked_fill(everything > positions[:, None], -1)
    exact = plain_attention(reference, queries, rows, seen, latent_dim=LATENT, scale=SCALE).out
    dense = mla.attend_dense(queries, rows, positions, latent_dim=LATENT, scale=SCALE)
    gathered = mla.attend(queries, rows, seen, latent_dim=LATENT, scale=SCALE)
    assert torch.allclose(dense, exact, atol=1e-6)
    assert torch.allclose(gathered, exact, atol=1e-6)
    few = seen[:, 3:10]
    exact = plain_attention(reference, queries, rows, few, latent_dim=LATENT, scale=SCALE).out
    gathered = mla.attend(queries, rows, few, latent_dim=LATENT, scale=SCALE)
    assert torch.allclose(gathered, exact, atol=1e-6)
