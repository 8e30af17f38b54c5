"""DeepSeek-V3.2 on one of 32 GPUs that divide its experts: random weights in blocks of fp8.

A rank has 8 of 256 routed experts and the shared one. It gets eight times its own tokens from 32
ranks; here its own tokens each go to all of its eight, which are as many lines, and no dispatch or
combine runs. Layers are cut to a few, and the vocabulary in the same proportion.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
import torch
from torch import Tensor

from ess.layout import ModelLayout
from ess.models.config import ModelConfig
from ess.models.layers import TensorSource
from ess.models.model import Model
from ess.models.registry import build
from ess.models.registry import read_config as typed
from ess.models.weights.expected.dry_run import read_config
from ess.models.weights.expected.kept_bytes import kept_bytes
from ess.models.weights.expected.shapes import Spec, expected_tensors, scale_shape
from ess.models.weights.expected.verify import FP8
from ess.models.weights.files.header import Entry
from ess.models.weights.kept import Fp8Weight, Weight

RANKS: Final = 32
CODES: Final = 0x70
CODES_RMS: Final = 32.0
"""About the root mean square of values with random codes below; the largest value is 240."""
REACH: Final = 0.8
VOCABULARY_STEP: Final = 64
TABLES: Final = torch.bfloat16


def worker_config() -> ModelConfig:
    """The worker's config: all layers, on one rank."""
    whole = typed(read_config("deepseek-v3.2"))
    return msgspec.structs.replace(
        whole,
        expert_count=whole.expert_count // RANKS,
        expert_group_count=1,
        expert_groups_kept=1,
        eos_ids=(),
    )


def cut(config: ModelConfig, layer_count: int) -> ModelConfig:
    """A config with this many expert layers, and the MTP module; a dense layer has as many weights
    as one of nine experts."""
    total = layer_count + config.mtp_layer_count
    share = total / config.layer_total
    vocabulary = math.ceil(config.vocab_size * share / VOCABULARY_STEP) * VOCABULARY_STEP
    return msgspec.structs.replace(
        config, layer_count=layer_count, dense_layer_count=0, vocab_size=vocabulary
    )


def weight_bytes(config: ModelConfig) -> int:
    entries = {spec.name: _entry(spec) for spec in expected_tensors(config)}
    return kept_bytes(config, entries, "stored")


def _entry(spec: Spec) -> Entry:
    """The entry as in DeepSeek's files."""
    dtype = FP8 if spec.role == "linear" else "BF16"
    return Entry(file="", name=spec.name, dtype=dtype, shape=spec.shape, begin=0, end=0)


def random_model(config: ModelConfig, device: torch.device) -> Model:
    return build(config, source(config, device))


def source(config: ModelConfig, device: torch.device) -> TensorSource:
    """Makes each weight on request; the same ones whenever they are requested in the same order."""
    specs = {spec.name: spec for spec in expected_tensors(config)}
    torch.manual_seed(0)
    return lambda name: _drawn(specs[name], device)


def _drawn(spec: Spec, device: torch.device) -> Weight:
    if len(spec.shape) == 1:
        is_added = spec.name.endswith("bias")
        return torch.full(spec.shape, 0.0 if is_added else 1.0, device=device)
    reach = REACH / math.sqrt(spec.shape[1])
    if spec.role != "linear":
        return torch.randn(spec.shape, dtype=TABLES, device=device) * reach
    scales = torch.full(scale_shape(spec.shape), reach / CODES_RMS, device=device)
    return Fp8Weight(_codes(spec.shape, device), scales)


def _codes(shape: tuple[int, ...], device: torch.device) -> Tensor:
    sizes = torch.randint(0, CODES, shape, dtype=torch.uint8, device=device)
    signs = torch.randint(0, 2, shape, dtype=torch.uint8, device=device)
    return (sizes + 128 * signs).view(torch.float8_e4m3fn)


def layout_of(config: ModelConfig) -> ModelLayout:
    return config.layout(name="a slice of deepseek-v3.2")
