"""Tiny random checkpoints under the real tensor names, of the shapes that tests share.

Every norm, bias and correction is random as well: a loader that forgets one of them, or swaps two,
gives other logits. Matrices keep the scale of their input, so logits stay of order one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ess.models.registry import read_config
from ess.models.tiny.trainer.shape import FP8
from ess.models.tiny.trainer.stored import Form, stored_form, write_checkpoint
from ess.models.weights.shapes import Spec, expected_tensors

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
    **{k: v for k, v in V32.items() if k not in ("rope_scaling", "rope_theta")},
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


def _draw(spec: Spec, generator: torch.Generator) -> Tensor:
    """Norms 0.5..1.5, biases sigma 0.1, embeddings sigma 1, matrices sigma in^-0.5."""
    if spec.name.endswith("norm.weight"):
        return torch.rand(spec.shape, generator=generator) + 0.5
    noise = torch.randn(spec.shape, generator=generator)
    if len(spec.shape) == 1:
        return noise * 0.1
    return noise if "embed_tokens" in spec.name else noise * spec.shape[-1] ** -0.5


def random_tensors(config: dict[str, Any], *, seed: int = 0) -> dict[str, Tensor]:
    """All tensors of the config in f32. MTP's copies of embedding and head equal the main ones."""
    generator = torch.Generator().manual_seed(seed)
    made = {spec.name: _draw(spec, generator) for spec in expected_tensors(read_config(config))}
    for name in made:
        if name.startswith("model.layers.") and name.endswith("embed_tokens.weight"):
            made[name] = made["model.embed_tokens.weight"].clone()
        elif name.endswith("shared_head.head.weight"):
            made[name] = made["lm_head.weight"].clone()
    return made


def random_checkpoint(
    folder: Path, config: dict[str, Any], *, form: Form = "f32", seed: int = 0, shards: int = 1
) -> Path:
    """Write a random checkpoint of any deepseek_v32 or glm_moe_dsa config and return its folder."""
    held = stored_form(config, random_tensors(config, seed=seed), form)
    said = {**config, "torch_dtype": "float32" if form == "f32" else "bfloat16"}
    if form == "fp8":
        said["quantization_config"] = FP8
    write_checkpoint(folder, said, held, shards=shards)
    return folder
