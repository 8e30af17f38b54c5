"""Random weights under real names, the same on every machine and with every NumPy.

RandomState's uniform stream is frozen by NumPy's own promise, so a golden file can hold results
without the weights. Every norm, bias and correction is random: a loader that skips one is seen.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any, Final

import msgspec
import numpy as np
import torch

from ess.models.config import ModelConfig
from ess.models.model import Model
from ess.models.registry import build, read_config
from ess.models.weights.expected.shapes import HEAD, expected_tensors

V32: Final[dict[str, Any]] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 16,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "index_topk": 64,
    "index_head_dim": 128,
    "index_n_heads": 16,
    "first_k_dense_replace": 1,
}

GLM: Final[dict[str, Any]] = {
    **{key: V32[key] for key in V32 if key not in ("rope_scaling", "rope_theta")},
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "v_head_dim": 48,
    "qk_nope_head_dim": 40,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "index_topk_freq": 2,
    "index_skip_topk_offset": 2,
    "index_share_for_mtp_iteration": True,
}

AXK2: Final[dict[str, Any]] = {
    **V32,
    "architectures": ["AXK2ForCausalLM"],
    "model_type": "axk2",
    "num_nextn_predict_layers": 0,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "gated_norm_rank": 4,
}

HY4: Final[dict[str, Any]] = {
    **GLM,
    "architectures": ["HYV4ForCausalLM"],
    "model_type": "hy_v4",
    "num_nextn_predict_layers": 0,
    "num_hidden_layers": 6,
    "pad_token_id": 2,
    "hc_mult": 2,
    "swiglu_limit": 1.0,
}

_MISTRAL4_TEXT: Final[dict[str, Any]] = {
    **{key: GLM[key] for key in GLM if key not in ("model_type", "architectures", "q_lora_rank")},
    "model_type": "mistral_large4_text",
    "num_nextn_predict_layers": 0,
    "num_hidden_layers": 5,
    "scoring_func": "softmax",
    "n_group": 4,
    "topk_group": 2,
    "indexer_types": ["full", "full", "shared", "full", "shared"],
    "routed_scaling_factor": 1.5,
    "kv_lora_rank": 128,
    "hidden_size": 128,
    "final_logit_softcapping": 2.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.0,
    },
}
PIXTRAL: Final[dict[str, Any]] = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}


DOTS3: Final[dict[str, Any]] = {
    **{key: GLM[key] for key in GLM if not key.startswith(("index_topk_", "index_s", "rope_p"))},
    "architectures": ["Dots3NoteForCausalLM"],
    "model_type": "dots3_note_text",
    "num_nextn_predict_layers": 0,
    "num_hidden_layers": 6,
    "hidden_size": 128,
    "kv_lora_rank": 128,
    "head_dim": 104,
    "pad_token_id": 2,
    "n_group": 2,
    "shared_experts_intermediate_size": 64,
    "sliding_window": 12,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 64,
    "swa_kv_lora_rank": 256,
    "swa_head_dim": 80,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 24,
}


def published(weights: dict[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """By the names that a checkpoint of the family has."""
    return {_theirs(name, config.words): weight for name, weight in weights.items()}


def _theirs(name: str, words: tuple[tuple[str, str], ...]) -> str:
    whole = f".{name}."
    for theirs, ours in words:
        whole = whole.replace(f".{ours}.", f".{theirs}.")
    return whole[1:-1]


def of_text(text: dict[str, Any]) -> dict[str, Any]:
    """A whole Mistral-Large-4 around its text."""
    whole = {"model_type": "mistral_large4", "tie_word_embeddings": False}
    names = {"architectures": ["MistralLarge4ForConditionalGeneration"]}
    sizes = {"vocab_size": text["vocab_size"]}
    return {**whole, **names, **sizes, "text_config": text, "vision_config": PIXTRAL}


MISTRAL4: Final = of_text(_MISTRAL4_TEXT)

_GLM5_NEXT_TEXT: Final[dict[str, Any]] = {
    **{key: GLM[key] for key in GLM if not key.startswith(("index_topk_", "index_s", "rope_p"))},
    "model_type": "glm5_next_text",
    "num_nextn_predict_layers": 0,
    "num_hidden_layers": 8,
    "hidden_size": 128,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 0,
    "n_group": 2,
    "topk_group": 1,
    "index_kpool": 8,
    "linear_num_heads": 2,
    "linear_head_dim": 16,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 5,
    "swiglu_limit": 1.0,
    "mlp_layer_types": ["dense"] + ["sparse"] * 7,
    "pad_token_id": 2,
}
VISION: Final[dict[str, Any]] = {
    "model_type": "glm5_next_vision",
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "intermediate_size": 32,
    "projection_intermediate_size": 32,
}
LAYER_KINDS: Final = ("indexed_attention", "linear_attention")


def glm5_next(kinds: str, **changes: Any) -> dict[str, Any]:
    """A whole GLM-5-next around its text, with layers of an indexer (I) and linear ones (L)."""
    layers = {
        "num_hidden_layers": len(kinds),
        "layer_types": [LAYER_KINDS[kind == "L"] for kind in kinds],
        "mlp_layer_types": ["dense"] + ["sparse"] * (len(kinds) - 1),
    }
    text = {**_GLM5_NEXT_TEXT, **layers, **changes}
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "tie_word_embeddings": False,
        "vocab_size": text["vocab_size"],
        "text_config": text,
        "vision_config": VISION,
    }


GLM5_NEXT: Final = glm5_next("LLLILLLI")
GLM5_NEXT_ROWS: Final = glm5_next("IIIII", indexer_types=["full", "full", "shared", "full", "full"])
_TINY: Final[dict[str, Any]] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "index_topk": 16,
}
TINY_LLAMA: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 16,
}
TINY_V32: Final = {**V32, **_TINY}
TINY_GLM: Final = {**GLM, **_TINY}
TINY_HY4: Final = {**HY4, **_TINY, "num_hidden_layers": 6}
TINY_AXK2: Final = {**AXK2, **_TINY}
TINY_DOTS3: Final = {**DOTS3, **_TINY, "num_hidden_layers": 6}


def tiny_glm5_next(kinds: str, **changes: Any) -> dict[str, Any]:
    return glm5_next(
        kinds, **{**_TINY, "num_hidden_layers": len(kinds), "index_kpool": 4, **changes}
    )


# Two layers share a selection; linear layers before, between and behind those with rows.
TINY_GLM5_NEXT: Final = tiny_glm5_next(
    "LILIIL", indexer_types=["full", "full", "full", "full", "shared", "full"]
)
TINY_MISTRAL4: Final = of_text(
    {key: value for key, value in {**_MISTRAL4_TEXT, **_TINY}.items() if key != "q_lora_rank"}
    | {"num_hidden_layers": 5}
)

SMALL: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "index_topk": 24,
    "index_n_heads": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
"""Sizes over those of V32 or GLM, for tests in which an engine runs the model."""


def tensors(config: ModelConfig, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Matrices have the deviation 0.8 / sqrt(hidden): 0.05 for 256, and logits of about 1."""
    reach = 0.8 * (3 / config.hidden_dim) ** 0.5
    return {
        spec.name: _drawn(spec.name, spec.shape, seed, reach).clone()
        for spec in expected_tensors(config)
        if not (config.tie_head and spec.name == HEAD)
    }


@functools.lru_cache(1 << 10)
def _drawn(name: str, shape: tuple[int, ...], seed: int, reach: float) -> torch.Tensor:
    """Kept: configurations that differ in a few numbers have most tensors in common."""
    values = np.random.RandomState(zlib.crc32(f"{seed} {name}".encode())).random_sample(shape)
    values *= 2
    values -= 1
    if len(shape) > 1:
        values *= reach
    elif name.endswith("bias"):
        values *= 0.17
    else:
        values /= 2
        values += 1
    return torch.from_numpy(values.astype(np.float32))


def tokens(count: int, vocab_size: int, *, seed: int) -> list[int]:
    state = np.random.RandomState(seed)
    return [int(token) for token in state.randint(0, vocab_size, count)]


def model(raw: dict[str, Any], **changes: Any) -> Model:
    """The random model of `raw`; `changes` are fields of ModelConfig."""
    config = msgspec.structs.replace(read_config(raw), **changes)
    return build(config, tensors(config).__getitem__)


@functools.cache
def small(family: str = "v32", *, layer_count: int = 2, **changes: bool) -> Model:
    """The random model with sizes SMALL; from here on torch computes in one thread."""
    torch.set_num_threads(1)
    raw = {"v32": V32, "glm": GLM}[family]
    return model({**raw, **SMALL, "num_hidden_layers": layer_count}, **changes)
