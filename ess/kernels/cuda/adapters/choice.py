"""Which kernels of other libraries are used beside ours, and a line for people on each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from ess.errors import Unavailable
from ess.kernels.cuda.adapters import deep_gemm, deep_gemm_experts, deep_gemm_linear, flash_mla
from ess.kernels.cuda.adapters.deep_gemm import DeepGemm
from ess.kernels.cuda.adapters.deep_gemm_experts import DeepGemmExperts
from ess.kernels.cuda.adapters.deep_gemm_linear import DeepGemmLinear
from ess.kernels.cuda.adapters.flash_mla import FlashMla

Adapter = TypeVar("Adapter", FlashMla, DeepGemm, DeepGemmExperts, DeepGemmLinear)


class Choice(NamedTuple):
    """None is where only our own kernels serve."""

    attention: FlashMla | None
    indexer: DeepGemm | None
    experts: DeepGemmExperts | None
    dense: DeepGemmLinear | None
    lines: tuple[str, ...]


def choose(device: torch.device) -> Choice:
    attention, whole = _tried(flash_mla.load, device)
    indexer, logits = _tried(deep_gemm.load, device)
    experts, products = _tried(deep_gemm_experts.load, device)
    dense, linear = _tried(deep_gemm_linear.load, device)
    lines = f"attention: {whole}", f"indexer: {logits}", f"experts: {products}", f"dense: {linear}"
    return Choice(attention, indexer, experts, dense, lines)


def _tried(
    load: Callable[[torch.device], Adapter], device: torch.device
) -> tuple[Adapter | None, str]:
    try:
        loaded = load(device)
    except Unavailable as reason:
        return None, f"triton ({reason})"
    return loaded, loaded.line
