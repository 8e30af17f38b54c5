"""DeepSeek-V3.2: an indexer in every layer, its rope half-split (main attention interleaves)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ess.models.config import ModelConfig, parse

if TYPE_CHECKING:
    from ess.models.layers import TensorSource
    from ess.models.model import Model


DEFAULTS: Final = {
    "indexer_rope_interleave": False,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
}


def read(raw: Mapping[str, Any]) -> ModelConfig:
    return parse(raw, defaults=DEFAULTS)


def build(config: ModelConfig, tensor: TensorSource) -> Model:
    from ess.models.model import Model

    return Model(config, tensor)
