"""What config.json may say, key by key: read as transformers reads it, or refused by its name.

`SAME` is compared with transformers itself (tests/model/test_config_oracle.py), `REFUSED` names the
key that the refusal must name (tests/unit/test_config_keys.py). Each row changes a tiny checkpoint.
"""

from __future__ import annotations

from typing import Any, Final

from tests.support.checkpoints import TINY_GLM, TINY_V32

Change = dict[str, Any]
GONE: Final = object()
BASES: Final = {"deepseek_v32": TINY_V32, "glm_moe_dsa": TINY_GLM}
YARN: Final = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
OLD_YARN: Final = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LAYERS: Final = TINY_V32["num_hidden_layers"]
NO_ROPE: Final = {"rope_scaling": GONE, "rope_theta": GONE, "rope_parameters": GONE}


def changed(family: str, change: Change) -> Change:
    """The tiny configuration of a family with some keys changed, or taken away where GONE."""
    raw = {**BASES[family], **change}
    return {key: value for key, value in raw.items() if value is not GONE}


def yarn(**more: Any) -> Change:
    """YaRN as rope_scaling says it, which replaces that of the tiny checkpoint."""
    rope = {**YARN, **more}
    return {"rope_scaling": {key: value for key, value in rope.items() if value is not GONE}}


ROPE: Final[dict[str, Change]] = {
    "yarn": yarn(),
    "yarn by its old name": {"rope_scaling": OLD_YARN},
    "yarn by both names": yarn(type="linear"),
    "yarn in rope_parameters": {"rope_scaling": GONE, "rope_parameters": YARN},
    "truncate true": yarn(truncate=True),
    "truncate false": yarn(truncate=False),
    "truncate false, other turns": yarn(truncate=False, beta_fast=9, beta_slow=2.5),
    "factor null": yarn(factor=None),
    "factor null, attention_factor": yarn(factor=None, attention_factor=1.25),
    "factor 1": yarn(factor=1.0),
    "factor whole": yarn(factor=40, mscale=1, mscale_all_dim=1),
    "trained length from max_position_embeddings": yarn(original_max_position_embeddings=GONE),
    "trained length beside rope": {**yarn(), "original_max_position_embeddings": 200},
    "turns": yarn(beta_fast=8, beta_slow=2),
    "turns null": yarn(beta_fast=None, beta_slow=None),
    "turns upside down": yarn(beta_fast=1, beta_slow=4),
    "turns equal": yarn(beta_fast=2, beta_slow=2, truncate=False),
    "every pair turns slowly": yarn(original_max_position_embeddings=4),
    "every pair turns fast": {**yarn(original_max_position_embeddings=4096), "rope_theta": 1.5},
    "mscale both": yarn(mscale=1.0, mscale_all_dim=1.0),
    "mscale both, unequal": yarn(mscale=0.707, mscale_all_dim=1.0),
    "mscale alone": yarn(mscale=0.707),
    "mscale_all_dim alone": yarn(mscale_all_dim=0.707),
    "mscale 0": yarn(mscale=0, mscale_all_dim=1.0),
    "attention_factor": yarn(attention_factor=1.25),
    "attention_factor and mscale_all_dim": yarn(attention_factor=0.75, mscale_all_dim=1.0),
    "rope_theta inside": yarn(rope_theta=500.0),
    "rope_theta whole": {"rope_theta": 500},
    "no rope": NO_ROPE,
    "rope null": {**NO_ROPE, "rope_scaling": None, "rope_parameters": None, "rope_theta": 500.0},
    "default with what yarn needs": {"rope_scaling": {**YARN, "rope_type": "default"}},
    "partial_rotary_factor 1": {**yarn(), "partial_rotary_factor": 1.0},
    "rope_scaling empty beside rope_parameters": {
        "rope_scaling": {},
        "rope_theta": GONE,
        "rope_parameters": {**YARN, "rope_theta": 500.0},
    },
    "rope_scaling beside rope_parameters": {
        **yarn(rope_theta=500.0),
        "rope_theta": GONE,
        "rope_parameters": {"rope_type": "default", "rope_theta": 800.0},
    },
    "rope_scaling beside rope_parameters, one theta": {
        **yarn(),
        "rope_theta": 500.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
}

MODEL: Final[dict[str, Change]] = {
    "norm_topk_prob": {"norm_topk_prob": False},
    "n_group and topk_group": {"n_group": 2, "topk_group": 1},
    "routed_scaling_factor": {"routed_scaling_factor": 0.75},
    "num_experts_per_tok": {"num_experts_per_tok": 4},
    "n_shared_experts 0": {"n_shared_experts": 0},
    "n_shared_experts 2": {"n_shared_experts": 2},
    "first_k_dense_replace 0": {"first_k_dense_replace": 0},
    "first_k_dense_replace above the layers": {"first_k_dense_replace": 9},
    "mlp_layer_types": {"mlp_layer_types": ["sparse", "dense", "sparse"]},
    "tie_word_embeddings": {"tie_word_embeddings": True},
    "rms_norm_eps": {"rms_norm_eps": 0.01},
    "index_topk": {"index_topk": 5},
    "index_head_dim": {"index_head_dim": 96},
    "index_n_heads": {"index_n_heads": 12},
    "qk_rope_head_dim": {"qk_rope_head_dim": 30},
    "kv_lora_rank": {"kv_lora_rank": 50},
    "defaults of the family": {
        **dict.fromkeys(("n_group", "topk_group", "routed_scaling_factor", "rms_norm_eps"), GONE),
        **dict.fromkeys(("norm_topk_prob", "n_shared_experts", "tie_word_embeddings"), GONE),
        "n_routed_experts": 16,
    },
    "defaults of the family, factor null": {
        **yarn(factor=None, rope_theta=1e6),
        "max_position_embeddings": GONE,
    },
    "layer_types": {"layer_types": ["indexed_attention"] * LAYERS},
    "layer_types by their old name": {"layer_types": ["deepseek_sparse_attention"] * LAYERS},
    "as many keys as heads": {"num_key_value_heads": TINY_V32["num_attention_heads"]},
    "num_experts": {"num_experts": TINY_V32["n_routed_experts"]},
}

# Keys that transformers keeps, and that change no logit.
WITHOUT_EFFECT: Final[Change] = {
    "attention_dropout": 0.5,
    "bos_token_id": 7,
    "chunk_size_feed_forward": 2,
    "eos_token_id": [5, 7],
    "ep_size": 4,
    "head_dim": 7,
    "id2label": None,
    "initializer_range": 9.0,
    "label2id": None,
    "output_hidden_states": True,
    "output_router_logits": True,
    "pad_token_id": 3,
    "pretraining_tp": 2,
    "problem_type": None,
    "qk_head_dim": 7,
    "return_dict": True,
    "sliding_window": 4,
    "transformers_version": "4.0.0",
    "use_cache": True,
}

INDEXERS: Final[dict[str, Change]] = {
    "frequency": {"index_topk_freq": 3},
    "frequency and offset": {"index_topk_freq": 2, "index_skip_topk_offset": 1},
    "frequency 1": {"index_topk_freq": 1},
    "pattern": {"index_topk_pattern": "FSS"},
    "pattern as a list": {"index_topk_pattern": ["full", "shared", "full"]},
    "pattern null": {"index_topk_pattern": None},
    "types": {"indexer_types": ["full", "shared", "full"]},
    "types before the pattern": {
        "indexer_types": ["full", "shared", "full"],
        "index_topk_pattern": "FSS",
    },
    "interleaved rope": {"indexer_rope_interleave": True},
    "defaults": {"index_topk_freq": GONE, "index_skip_topk_offset": GONE},
}

EVERY_INDEXER: Final[dict[str, Change]] = {
    "frequency 1": {"index_topk_freq": 1, "index_skip_topk_offset": 3},
    "pattern": {"index_topk_pattern": "FFF"},
    "types": {"indexer_types": ["full"] * LAYERS},
    "rope in halves": {"indexer_rope_interleave": False},
}

GLM_ROPE: Final[dict[str, Change]] = {
    "yarn in rope_parameters": {"rope_parameters": {**YARN, "rope_theta": 1e6}},
    "yarn switched on beside": {"rope_scaling": {**YARN, "rope_theta": 1e6}},
    "default": {"rope_parameters": {"rope_theta": 8e6}},
}

SAME: Final[dict[tuple[str, str], Change]] = {
    **{("deepseek_v32", name): change for name, change in ROPE.items()},
    **{("deepseek_v32", name): change for name, change in EVERY_INDEXER.items()},
    **{("glm_moe_dsa", name): change for name, change in (INDEXERS | GLM_ROPE).items()},
    **{
        (family, name): change
        for family in BASES
        for name, change in (MODEL | {"without effect": WITHOUT_EFFECT}).items()
    },
}

# The key that the sentence must name, and what is changed.
_BOTH: Final[list[tuple[str, Change]]] = [
    ("hidden_act", {"hidden_act": "gelu"}),
    ("scoring_func", {"scoring_func": "softmax"}),
    ("topk_method", {"topk_method": "greedy"}),
    ("moe_layer_freq", {"moe_layer_freq": 2}),
    ("attention_bias", {"attention_bias": True}),
    ("mlp_bias", {"mlp_bias": True}),
    ("rope_interleave", {"rope_interleave": False}),
    ("is_causal", {"is_causal": False}),
    ("is_encoder_decoder", {"is_encoder_decoder": True}),
    ("q_lora_rank", {"q_lora_rank": None}),
    ("num_key_value_heads", {"num_key_value_heads": 1}),
    ("num_experts", {"num_experts": 4}),
    ("num_local_experts", {"num_local_experts": 4}),
    ("layer_types", {"layer_types": ["indexed_attention", "full_attention", "indexed_attention"]}),
    ("layer_types", {"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": 8}),
    ("layer_types", {"layer_types": ["indexed_attention"]}),
    ("layer_types", {"layer_types": "indexed_attention"}),
    ("per_layer_config", {"per_layer_config": {"1": {"num_experts_per_tok": 1}}}),
    ("kv_sharing_modes", {"kv_sharing_modes": ["own", "reuse", "own"]}),
    ("transformers_weights", {"transformers_weights": "other.safetensors"}),
    ("auto_map", {"auto_map": {"AutoModel": "other.Model"}}),
    ("mlp_layer_types", {"mlp_layer_types": ["dense"]}),
    ("indexer_types", {"indexer_types": ["shared", "full", "full"]}),
    ("indexer_types", {"indexer_types": ["full"]}),
    ("index_topk_pattern", {"index_topk_pattern": "FXF"}),
    ("index_topk_pattern", {"index_topk_pattern": 5}),
    ("index_topk", {"index_topk": 0}),
    ("index_head_dim", {"index_head_dim": 66}),
    ("index_head_dim", {"index_head_dim": 32}),
    ("qk_rope_head_dim", {"qk_rope_head_dim": 0}),
    ("n_group", {"n_group": 3}),
    ("n_group", {"n_group": 8}),
    ("topk_group", {"topk_group": 5}),
    ("n_routed_experts", {"n_routed_experts": 516}),
    ("num_experts_per_tok", {"num_experts_per_tok": 9}),
    ("num_nextn_predict_layers", {"num_nextn_predict_layers": 2}),
    ("eos_token_id", {"eos_token_id": 128}),
    ("eos_token_id", {"eos_token_id": [1, -1]}),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ("partial_rotary_factor", yarn(partial_rotary_factor=0.5, rope_theta=1e6)),
]
_ROPE: Final[list[tuple[str, Change]]] = [
    *(
        (f"rope_type '{kind}' in rope_scaling", yarn(rope_type=kind))
        for kind in ("linear", "dynamic", "longrope", "llama3", "proportional")
    ),
    ("rope_type 'llama3' in rope_scaling", yarn(rope_type="llama3", low_freq_factor=1.0)),
    ("factor", yarn(factor=GONE)),
    ("factor", yarn(factor=None, mscale_all_dim=1.0)),
    ("factor", yarn(factor=None, original_max_position_embeddings=8192)),
    ("factor", yarn(factor=0.5)),
    ("truncate", yarn(truncate=None)),
    ("truncate", yarn(truncate=0)),
    ("attention_factor", yarn(attention_factor=0.0)),
    ("mscale_all_dim", yarn(mscale_all_dim=-1.0)),
    ("original_max_position_embeddings", yarn(original_max_position_embeddings=0)),
    ("beta_fast", yarn(beta_fast=0)),
    ("short_factor", yarn(short_factor=[1.0] * 32)),
    ("extrapolation_factor", yarn(extrapolation_factor=1.0)),
    ("indexed_attention", {"rope_scaling": {"indexed_attention": YARN}}),
    ("rope_scaling", {"rope_scaling": "yarn"}),
    ("rope_parameters", {"rope_scaling": GONE, "rope_parameters": ["yarn"]}),
]
REFUSED: Final[list[tuple[str, str, Change]]] = [
    *((family, key, change) for family in BASES for key, change in _BOTH),
    *(("deepseek_v32", key, change) for key, change in _ROPE),
    ("deepseek_v32", "index_topk_freq", {"index_topk_freq": 2}),
    ("deepseek_v32", "index_topk_pattern", {"index_topk_pattern": "FSF"}),
    ("deepseek_v32", "indexer_types", {"indexer_types": ["full", "full", "shared"]}),
    ("deepseek_v32", "indexer_rope_interleave", {"indexer_rope_interleave": True}),
    ("glm_moe_dsa", "indexer_rope_interleave", {"indexer_rope_interleave": False}),
    ("glm_moe_dsa", "rope_theta", {"rope_scaling": YARN}),
]
