"""The embedded model's dimensions, and the config.json with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from ess.models.tiny.trainer.texts.vocabulary import BEGIN_ID, END_ID, VOCABULARY_SIZE

BLOCK: Final = 128
FP8: Final = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "scale_fmt": "ue8m0",
    "weight_block_size": [BLOCK, BLOCK],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A DeepSeek-V3.2 of true row size (512 + 64); everything else is small.

    Query/key heads are as wide as value heads, so that torch's fused CPU attention takes them.
    Rope is YaRN to 128K from the very first step (`rope_factor` x `rope_original`): the model is
    trained with the frequencies and the softmax scale it is served with, so nothing changes at any
    length, and the slow pairs never turn far, which is what keeps untrained distances harmless.
    """

    vocabulary: int = VOCABULARY_SIZE
    hidden: int = 256
    layer_count: int = 6
    dense_layer_count: int = 1
    mtp_layer_count: int = 1
    head_count: int = 4
    nope: int = 64
    rope: int = 64
    value: int = 128
    query_rank: int = 128
    latent: int = 512
    dense_width: int = 768
    expert_count: int = 8
    experts_per_token: int = 2
    expert_width: int = 192
    group_count: int = 4
    groups_kept: int = 2
    index_head_count: int = 8
    index_dim: int = 128
    top_k: int = 256
    norm_eps: float = 1e-6
    rope_base: float = 10000.0
    rope_factor: float = 32.0
    rope_original: int = 4096

    def config(self, *, fp8: bool) -> dict[str, Any]:
        """config.json in the published key names of DeepSeek-V3.2."""
        quantisation = {"quantization_config": FP8} if fp8 else {}
        return _model_keys(self) | _rope_keys(self) | quantisation


def _model_keys(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.dense_width,
        "moe_intermediate_size": shape.expert_width,
        "num_hidden_layers": shape.layer_count,
        "num_nextn_predict_layers": shape.mtp_layer_count,
        "num_attention_heads": shape.head_count,
        "num_key_value_heads": shape.head_count,
        "n_routed_experts": shape.expert_count,
        "n_shared_experts": 1,
        "num_experts_per_tok": shape.experts_per_token,
        "n_group": shape.group_count,
        "topk_group": shape.groups_kept,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": shape.dense_layer_count,
        "moe_layer_freq": 1,
        "q_lora_rank": shape.query_rank,
        "kv_lora_rank": shape.latent,
        "qk_nope_head_dim": shape.nope,
        "qk_rope_head_dim": shape.rope,
        "v_head_dim": shape.value,
        "index_n_heads": shape.index_head_count,
        "index_head_dim": shape.index_dim,
        "index_topk": shape.top_k,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BEGIN_ID,
        "eos_token_id": END_ID,
        "torch_dtype": "bfloat16",
    }


def _rope_keys(shape: ModelShape) -> dict[str, Any]:
    return {
        "max_position_embeddings": int(shape.rope_factor * shape.rope_original),
        "rope_theta": shape.rope_base,
        "rope_scaling": {
            "type": "yarn",
            "factor": shape.rope_factor,
            "original_max_position_embeddings": shape.rope_original,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }
