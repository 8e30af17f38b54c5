"""DeepSeek-V3.2: an indexer in every layer, its rope half-split (main attention interleaves)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Unpack

from ess.errors import BadInput
from ess.models.config import ModelConfig
from ess.models.config_json.reading import parse

if TYPE_CHECKING:
    from ess.models.layers import TensorSource
    from ess.models.model import Model
    from ess.models.part import ModelPart


DEFAULTS: Final = {
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
}
SHARING: Final = ("indexer_types", "index_topk_pattern", "index_topk_freq")


def read(raw: Mapping[str, Any]) -> ModelConfig:
    config = parse(raw, defaults=DEFAULTS, fixed={"indexer_rope_interleave": False})
    require_own_indexers(config, raw)
    return config


def require_own_indexers(config: ModelConfig, raw: Mapping[str, Any]) -> None:
    if len(config.groups) != config.layer_total:
        key = next(key for key in SHARING if raw.get(key) is not None)
        raise BadInput(
            f"config.json of {config.family}: {key} {raw[key]!r:.60} lets layers share an indexer,"
            " but in this family each layer has its own"
        )


def build(config: ModelConfig, tensor: TensorSource, **part: Unpack[ModelPart]) -> Model:
    from ess.models.model import Model

    return Model(config, tensor, **part)
