from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ess.errors import BadInput
from ess.models.registry import read_config
from ess.models.tiny.trainer.shape import Shape
from ess.models.weights.blocks import dequantise, quantise
from ess.models.weights.shapes import expected_tensors
from ess.units import div_ceil
from tests.support.random_checkpoint import GLM, V32, random_checkpoint, random_tensors


@pytest.mark.parametrize("config", [V32, GLM], ids=["v32", "glm"])
def test_everything_is_random(config: dict[str, object]) -> None:
    for name, tensor in random_tensors(config).items():
        assert tensor.std() > 0.01, name


def test_seed_decides(tmp_path: Path) -> None:
    first, again, other = (random_tensors(V32, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_fp8_checkpoint_is_the_f32_one_within_a_block_step(tmp_path: Path) -> None:
    plain = load_file(random_checkpoint(tmp_path / "f32", V32) / "model.safetensors")
    held = load_file(random_checkpoint(tmp_path / "fp8", V32, form="fp8") / "model.safetensors")
    scaled = [name for name in held if name.endswith("_scale_inv")]
    assert len(held) == len(plain) + len(scaled)
    assert held["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (5, 2)
    for name in scaled:
        weight = name.removesuffix("_scale_inv")
        restored = dequantise(held[weight], held[name], dtype=torch.float32)
        torch.testing.assert_close(restored, plain[weight], rtol=1 / 16, atol=2e-4)
    assert held["model.norm.weight"].dtype == torch.float32
    assert held["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16


def test_shards_have_an_index(tmp_path: Path) -> None:
    folder = random_checkpoint(tmp_path, GLM, form="bf16", shards=3)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for file in set(index["weight_map"].values()):
        held = load_file(folder / file)
        assert set(held) == {name for name, at in index["weight_map"].items() if at == file}
    assert len(index["weight_map"]) == len(expected_tensors(read_config(GLM)))
    assert not any("layers.2.self_attn.indexer" in name for name in index["weight_map"])


def test_embedded_config_has_its_own_tensors() -> None:
    tensors = expected_tensors(read_config(Shape().config(fp8=True)))
    assert sum(math.prod(tensor.shape) for tensor in tensors) < 20_000_000


@pytest.mark.parametrize("size", [(1, 1), (128, 128), (576, 256), (130, 300)])
def test_blocks_round_trip(size: tuple[int, int]) -> None:
    weight = torch.randn(size, generator=torch.Generator().manual_seed(3))
    weight[0] = 0
    values, scale = quantise(weight)
    assert scale.shape == (div_ceil(size[0], 128), div_ceil(size[1], 128))
    assert torch.equal(scale, torch.exp2(torch.log2(scale).round()))
    torch.testing.assert_close(
        dequantise(values, scale, dtype=torch.float32), weight, rtol=1 / 16, atol=1e-4
    )


def test_bad_input_names_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="finite"):
        quantise(torch.full((2, 2), torch.nan))
    with pytest.raises(BadInput, match="llama"):
        expected_tensors(read_config(V32 | {"model_type": "llama"}))
    with pytest.raises(BadInput, match="shards is 0"):
        random_checkpoint(tmp_path, V32, shards=0)
