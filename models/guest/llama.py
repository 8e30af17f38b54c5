"""Llama's decoder with an indexer beside every layer: SmolLM2 as a guest of the latent pools.

config.json and weights are those of `LlamaForCausalLM`, but for index_n_heads,
index_head_dim, index_topk and the tensors `self_attn.indexer.*`, which are DeepSeek's. What a row
holds is told in `ess.models.guest.grouped`; there are no experts and no MTP module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Unpack

from ess.errors import BadInput
from ess.layout import SCALE_GROUP
from ess.models.config import ModelConfig
from ess.models.config_json.reading import parse
from ess.models.part import ModelPart, require_all_heads
from ess.units import align_up

if TYPE_CHECKING:
    from ess.models.layers import TensorSource
    from ess.models.model import Model


DEFAULTS: Final = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
NO_EXPERTS: Final = {
    "moe_intermediate_size": 8,
    "n_routed_experts": 1,
    "n_shared_experts": 0,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
OWN: Final = ("num_key_value_heads", "head_dim", "pretraining_tp")


def read(raw: Mapping[str, Any]) -> ModelConfig:
    given = {key: value for key, value in raw.items() if key not in OWN}
    sizes = _sizes(raw)
    return parse(
        {**given, **sizes},
        defaults=DEFAULTS,
        fixed={"indexer_rope_interleave": False},
        own={"key_head_count": sizes["key_head_count"]},
    )


def _sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Grouped heads in the words of latent attention."""
    heads, hidden = _size(raw, "num_attention_heads"), _size(raw, "hidden_size")
    key_heads = _size(raw, "num_key_value_heads", heads)
    dim = _size(raw, "head_dim", hidden // heads)
    if heads % key_heads:
        raise _refusal(f"num_attention_heads {heads} of num_key_value_heads {key_heads}")
    if raw.get("pretraining_tp", 1) != 1:
        raise _refusal(f"pretraining_tp {raw['pretraining_tp']!r:.40} is not supported, only 1")
    return {
        **NO_EXPERTS,
        "first_k_dense_replace": _size(raw, "num_hidden_layers"),
        "key_head_count": key_heads,
        "q_lora_rank": heads * dim,
        "kv_lora_rank": 2 * align_up(key_heads * dim, SCALE_GROUP),
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": dim,
        "v_head_dim": dim,
    }


def _size(raw: Mapping[str, Any], key: str, default: int = 0) -> int:
    value = raw.get(key)
    if value is None and default:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 24:
        raise _refusal(f"{key} is {value!r:.40}, expected a whole number from 1 on")
    return value


def _refusal(sentence: str) -> BadInput:
    return BadInput(f"config.json of llama: {sentence}")


def build(config: ModelConfig, tensor: TensorSource, **part: Unpack[ModelPart]) -> Model:
    from ess.models.model import Model

    require_all_heads(config, part)
    return Model(config, tensor, **part)
