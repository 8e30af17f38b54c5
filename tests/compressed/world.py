"""Tiny models of DeepSeek-V4: every norm, bias, sink and table drawn."""

from __future__ import annotations

import functools
from typing import Any, Final

import msgspec
import numpy as np
import torch

from ess.layout import ModelLayout
from ess.models.compressed.model import CompressedModel
from ess.models.config import ModelConfig
from ess.models.families import deepseek_v4
from ess.models.registry import read_config
from ess.models.weights.expected.shapes import expected_tensors
from tests.support import checkpoints

TINY: Final[dict[str, Any]] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 96,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.0,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 3,
    "sliding_window": 6,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "max_position_embeddings": 4096,
}
LISTED: Final = {
    **TINY,
    "layer_types": [
        "sliding_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe"],
    "num_nextn_predict_layers": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
    },
}
"""In the words of new files, with small windows; the next in those of published ones."""
RATIOS: Final = {
    **TINY,
    "sliding_window": 20,
    "compress_ratios": [0, 128, 4, 4, 128, 0],
    "num_nextn_predict_layers": 1,
    "num_hash_layers": 2,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
SPELLINGS: Final = {"listed": LISTED, "ratios": RATIOS}
DRAFTS: Final = 9


def weights(config: ModelConfig, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Sinks and shares of streams are around 0."""
    drawn = checkpoints.tensors(config, seed=seed)
    state = np.random.RandomState(seed)
    for spec in expected_tensors(config):
        if spec.role == "numbers":
            rows = [state.permutation(config.expert_count) for _ in range(spec.shape[0])]
            drawn[spec.name] = torch.tensor(np.array(rows)[:, : spec.shape[1]])
        if spec.name.endswith(("attn_sink", "_base")):
            drawn[spec.name] = 2 * (drawn[spec.name] - 1)
        if spec.name.endswith(".ape"):
            drawn[spec.name] = 5 * drawn[spec.name]
    return drawn


def published(drawn: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names that a checkpoint has."""
    config = msgspec.structs.replace(read_config(LISTED), words=deepseek_v4.PUBLISHED)
    return checkpoints.published(drawn, config)


@functools.cache
def tiny(spelling: str = "listed") -> CompressedModel:
    """From here on torch computes in one thread."""
    torch.set_num_threads(1)
    config = read_config(SPELLINGS[spelling])
    return CompressedModel(config, weights(config).__getitem__)


def layout(*, mtp: int, spelling: str = "listed") -> ModelLayout:
    """As a server that verifies so many tokens has it."""
    return read_config(SPELLINGS[spelling]).layout(row="f32", has_mtp=mtp > 1)


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())
