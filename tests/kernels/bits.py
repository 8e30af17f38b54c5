"""Hard floats, and equality that looks at bits."""

from __future__ import annotations

import numpy as np
import torch


def array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def same_values(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Bit for bit, but for what a NaN carries."""
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours.isnan(), theirs.isnan())
    kind = torch.int16 if ours.dtype == torch.bfloat16 else torch.int32
    ours, theirs = (values.masked_fill(values.isnan(), 0).view(kind) for values in (ours, theirs))
    assert torch.equal(ours, theirs)


def random_bits(seed: int, count: int) -> np.ndarray:
    bits = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
    return bits.view(np.float32)


def all_bf16() -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def torch_code(values: torch.Tensor) -> np.ndarray:
    return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
