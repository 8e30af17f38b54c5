"""Which kernels of others stand beside ours, and a line for people on each."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ess.errors import Unavailable
from ess.kernels.adapters import deep_gemm, deep_gemm_experts, flash_mla
from ess.kernels.adapters.deep_gemm import DeepGemm
from ess.kernels.adapters.deep_gemm_experts import DeepGemmExperts
from ess.kernels.adapters.flash_mla import FlashMla


class Choice(NamedTuple):
    """None is where only our own kernels serve."""

    attention: FlashMla | None
    indexer: DeepGemm | None
    experts: DeepGemmExperts | None
    lines: tuple[str, str, str]


def choose(device: torch.device) -> Choice:
    attention, attention_line = _try_attention(device)
    indexer, indexer_line = _try_indexer(device)
    experts, experts_line = _try_experts(device)
    lines = (
        f"attention: {attention_line}",
        f"indexer: {indexer_line}",
        f"experts: {experts_line}",
    )
    return Choice(attention, indexer, experts, lines)


def _try_attention(device: torch.device) -> tuple[FlashMla | None, str]:
    try:
        loaded = flash_mla.load(device)
    except Unavailable as reason:
        return None, f"triton ({reason})"
    return loaded, f"{loaded.line} for whole lists, triton for parts"


def _try_indexer(device: torch.device) -> tuple[DeepGemm | None, str]:
    try:
        loaded = deep_gemm.load(device)
    except Unavailable as reason:
        return None, f"triton ({reason})"
    return loaded, loaded.line


def _try_experts(device: torch.device) -> tuple[DeepGemmExperts | None, str]:
    try:
        loaded = deep_gemm_experts.load(device)
    except Unavailable as reason:
        return None, f"triton ({reason})"
    return loaded, loaded.line
