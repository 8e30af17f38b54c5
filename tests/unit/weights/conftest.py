"""Small checkpoints of both families, written name by name with random values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ess.models.registry import read_config
from ess.models.weights.blocks import quantise
from ess.models.weights.expected.shapes import Spec, expected_tensors
from ess.models.weights.stored import stores_fp8
from tests.support import checkpoints
from tests.support.checkpoints import GLM, V32

SMALL: dict[str, Any] = {
    **V32,
    "vocab_size": 96,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "index_n_heads": 8,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
EMBEDDED: dict[str, Any] = {
    **SMALL,
    "vocab_size": 4096,
    "intermediate_size": 768,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 6,
    "v_head_dim": 128,
    "n_routed_experts": 8,
}


def stored(spec: Spec, values: torch.Tensor, *, fp8: bool) -> dict[str, torch.Tensor]:
    """As a release stores it."""
    if fp8 and spec.role == "linear":
        return dict(zip((spec.name, spec.scale_name), quantise(values), strict=True))
    is_f32 = spec.role == "correction" or (spec.role == "norm" and fp8)
    return {spec.name: values if is_f32 else values.bfloat16()}


def write_checkpoint(
    folder: Path, raw: dict[str, Any], *, shard_count: int = 2
) -> dict[str, torch.Tensor]:
    """A checkpoint of `shard_count` files (1: no index); returns what was written."""
    config = read_config(raw)
    values = checkpoints.tensors(config)
    tensors: dict[str, torch.Tensor] = {}
    for spec in (spec for spec in expected_tensors(config) if spec.name in values):
        tensors |= stored(spec, values[spec.name], fp8=stores_fp8(raw))
    tensors = checkpoints.published(tensors, config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if shard_count == 1:
        save_file(tensors, folder / "model.safetensors")
        return tensors
    placed = {name: i * shard_count // len(tensors) + 1 for i, name in enumerate(tensors)}
    files = {name: f"model-{n:05}-of-{shard_count:05}.safetensors" for name, n in placed.items()}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, folder / file)
    index = {"metadata": {"total_size": 2 * len(tensors)}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


@pytest.fixture(scope="session")
def small() -> dict[str, Any]:
    return SMALL


@pytest.fixture(scope="session")
def glm() -> dict[str, Any]:
    return GLM


@pytest.fixture(scope="session")
def embedded() -> dict[str, Any]:
    return EMBEDDED


@pytest.fixture(scope="session")
def write() -> Callable[..., dict[str, torch.Tensor]]:
    return write_checkpoint


@pytest.fixture(scope="session")
def written(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, dict[str, torch.Tensor]]:
    """One small fp8 checkpoint in two shards, for tests that only read it."""
    folder = tmp_path_factory.mktemp("small")
    return folder, write_checkpoint(folder, SMALL)
