"""Hy4: GLM's shared selections, with sinks, gates of values and four residual streams.

Published weights rotate the first half against the second in attention, and the last dimensions of
index keys: they are reordered as they are read. The MTP module of published files is not read; its
computation is not published.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Unpack

import msgspec

from ess.errors import BadInput
from ess.models.config import ModelConfig
from ess.models.config_json.reading import named, parse
from ess.models.part import ModelPart, require_all_heads

if TYPE_CHECKING:
    from ess.models.layers import TensorSource
    from ess.models.model import Model


DEFAULTS: Final = {
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "first_k_dense_replace": 1,
    "index_topk_freq": 4,
}
# Keys of other families, which change nothing in this one.
FOREIGN: Final = (
    *("num_nextn_predict_layers", "first_k_dense_replace", "index_share_for_mtp_iteration"),
    *("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"),
)
FIXED: Final = {"indexer_rope_interleave": False, "rope_interleave": False}
READ: Final = {"swiglu_limit": 10.0, "hc_mult": 4, "hc_magnitude": 2.0, "hc_eps": 1e-6}
OWN: Final = {
    "value_gates": "input",
    "has_sinks": True,
    "reorders": True,
    "experts_stacked": True,
    "unread_prefixes": ("model.mtp_layers.",),
}


def read(raw: Mapping[str, Any]) -> ModelConfig:
    given = {key: value for key, value in raw.items() if key not in FOREIGN}
    own = {**OWN, **READ, **{key: raw[key] for key in READ if raw.get(key) is not None}}
    config = parse(given, defaults=DEFAULTS, fixed=FIXED, own=own)
    if config.stream_count == 1:
        with named(raw):
            raise BadInput("hc_mult 1 is not supported, only several residual streams")
    return msgspec.structs.replace(config, index_norm_eps=config.norm_eps)


def build(config: ModelConfig, tensor: TensorSource, **part: Unpack[ModelPart]) -> Model:
    from ess.models.families.layers.streams import StreamLayer, StreamModel
    from ess.models.families.order import in_our_order

    require_all_heads(config, part)
    source = in_our_order(config, tensor)
    return StreamModel(config, source, **part, layer=StreamLayer)
