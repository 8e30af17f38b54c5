"""A.X-K2: DeepSeek-V3.2 with three gates, each the sigmoid of something that the layer has anyway.

The gate of values: the projection that makes queries reads the normed low-rank query and the raw
one side by side, and makes a gate for each value of each head beside its query. The gates of the
layer's input and of the experts' input are two small products of the normed state. None of them is
kept beside the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Unpack

from ess.errors import BadInput
from ess.models.config import ModelConfig
from ess.models.config_json.reading import parse
from ess.models.families.deepseek_v32 import require_own_indexers
from ess.models.part import ModelPart, require_all_heads

if TYPE_CHECKING:
    from ess.models.layers import TensorSource
    from ess.models.model import Model


DEFAULTS: Final = {
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "first_k_dense_replace": 1,
}
FIXED: Final = {"indexer_rope_interleave": False, "num_nextn_predict_layers": 0}
GATE_RANK: Final = 16
GROUPS: Final = ("n_group", "topk_group")


def read(raw: Mapping[str, Any]) -> ModelConfig:
    for given, missing in (GROUPS, GROUPS[::-1]):
        if raw.get(given) is not None and raw.get(missing) is None:
            raise BadInput(f"config.json of axk2: {given} is given without {missing}")
    own = {
        "value_gates": "query",
        "gated_norm_rank": raw.get("gated_norm_rank", GATE_RANK),
        "expert_groups_zeroed": True,
    }
    config = parse(raw, defaults=DEFAULTS, fixed=FIXED, own=own)
    require_own_indexers(config, raw)
    return config


def build(config: ModelConfig, tensor: TensorSource, **part: Unpack[ModelPart]) -> Model:
    from ess.models.families.layers.gates import GatedLayer
    from ess.models.model import Model

    require_all_heads(config, part)
    return Model(config, tensor, **part, layer=GatedLayer)
