"""GLM-5, 5.1, 5.2, 5.3: interleaved rope everywhere; from 5.2 on, layers share indexers.

Which layers own an indexer comes from indexer_types, index_topk_pattern, or frequency and offset;
index_share_for_mtp_iteration makes later draft passes reuse the selection of the first. Checkpoints
of GLM-5.1 have an indexer in each layer: if their configuration is made to share selections, those
of layers that share are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Unpack

import msgspec

from ess.models.config import ModelConfig
from ess.models.config_json.reading import parse

if TYPE_CHECKING:
    from ess.models.layers import TensorSource
    from ess.models.model import Model
    from ess.models.part import ModelPart


DEFAULTS: Final = {
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202752,
}


def read(raw: Mapping[str, Any]) -> ModelConfig:
    config = parse(raw, defaults=DEFAULTS, fixed={"indexer_rope_interleave": True})
    shared = (n for n in range(config.layer_count) if not config.has_indexer(n))
    unread = tuple(f"model.layers.{n}.self_attn.indexer." for n in shared)
    return msgspec.structs.replace(config, unread_prefixes=unread)


def build(config: ModelConfig, tensor: TensorSource, **part: Unpack[ModelPart]) -> Model:
    from ess.models.model import Model

    return Model(config, tensor, **part)
