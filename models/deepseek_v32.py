"""DeepSeek-V3.2: an indexer in every layer, its rope half-split (main attention interleaves)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ess.models.config import ModelConfig, parse

if TYPE_CHECKING:
    from ess.models.layers import TensorSource
    from ess.models.model import Model


def read(raw: Mapping[str, Any]) -> ModelConfig:
    return parse(raw, defaults={"indexer_rope_interleave": False})


def build(config: ModelConfig, tensor: TensorSource) -> Model:
    from ess.models.model import Model

    return Model(config, tensor)
