"""Random checkpoints under real names, the same on every machine and with every NumPy.

RandomState's uniform stream is frozen by NumPy's own promise, so a golden file can hold results
without the weights. Every norm, bias and correction is random: a loader that skips one is seen.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import numpy as np
import torch

from ess.models.config import ModelConfig
from ess.models.model import Model
from ess.models.registry import build, read_config
from ess.models.weights.shapes import expected_tensors
from tests.support.random_checkpoint import GLM, V32

_TINY: dict[str, Any] = {
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
TINY_V32 = {**V32, **_TINY}
TINY_GLM = {**GLM, **_TINY}


def tensors(config: ModelConfig, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Matrices have the deviation 0.8 / sqrt(hidden): 0.05 for 256, and logits of about 1."""
    reach = 0.8 * (3 / config.hidden_dim) ** 0.5
    return {
        spec.name: _draw(spec.name, spec.shape, seed, reach)
        for spec in expected_tensors(config)
        if not spec.optional
    }


def _draw(name: str, shape: tuple[int, ...], seed: int, reach: float) -> torch.Tensor:
    state = np.random.RandomState(zlib.crc32(f"{seed} {name}".encode()))
    unit = state.random_sample(shape) * 2 - 1
    if len(shape) == 2:
        values = unit * reach
    elif name.endswith("bias"):
        values = unit * 0.17
    else:
        values = 1 + unit / 2
    return torch.from_numpy(values.astype(np.float32))


def tokens(count: int, vocab_size: int, *, seed: int) -> list[int]:
    state = np.random.RandomState(seed)
    return [int(token) for token in state.randint(0, vocab_size, count)]


def model(raw: dict[str, Any], **changes: Any) -> Model:
    """The random model of `raw`; `changes` are fields of ModelConfig."""
    config = msgspec.structs.replace(read_config(raw), **changes)
    return build(config, tensors(config).__getitem__)
