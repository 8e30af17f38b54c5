"""Which kernels of others stand beside ours, and a line for people on each."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ess.errors import Unavailable
from ess.kernels.adapters import deep_gemm, flash_mla
from ess.kernels.adapters.deep_gemm import DeepGemm
from ess.kernels.adapters.flash_mla import FlashMla


class Choice(NamedTuple):
    """None is where only our own kernels serve."""

    attention: FlashMla | None
    indexer: DeepGemm | None
    lines: tuple[str, str]


def choose(device: torch.device) -> Choice:
    attention, attention_line = _try_attention(device)
    indexer, indexer_line = _try_indexer(device)
    return Choice(attention, indexer, (f"attention: {attention_line}", f"indexer: {indexer_line}"))


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
