from __future__ import annotations

import pytest

from ess.models.tiny.trainer.shape import ModelShape


@pytest.fixture
def small() -> ModelShape:
    return ModelShape(
        vocabulary=96,
        hidden=32,
        layer_count=2,
        query_rank=16,
        latent=32,
        nope=16,
        rope=16,
        value=32,
        dense_width=48,
        expert_width=24,
        index_head_count=8,
        index_dim=32,
        top_k=8,
    )
