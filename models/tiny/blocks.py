"""DeepSeek's fp8 weights: e4m3 values with one f32 scale per block of 128 x 128.

Blocks at the right and lower edge may be partial (576 rows have 5 rows of scales, the last for 64
weights). Scales are powers of two, rounded up, so that a block never saturates and its scale is
exact in any format; an empty block gets the scale 1.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ess.errors import BadInput
from ess.models.tiny.shape import BLOCK
from ess.units import align_up, div_ceil

E4M3_MAX: Final = 448.0


def _blocked(weight: Tensor) -> Tensor:
    """[out, in] padded with zeros and viewed as [out block, 128, in block, 128]."""
    rows, columns = weight.shape
    padded = weight.new_zeros(align_up(rows, BLOCK), align_up(columns, BLOCK))
    padded[:rows, :columns] = weight
    return padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)


def quantise_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as (e4m3 weight, f32 weight_scale_inv): weight = value * scale of its block."""
    if weight.dim() != 2 or not weight.isfinite().all():
        raise BadInput(f"need a finite matrix, got {tuple(weight.shape)}")
    blocks = _blocked(weight.float())
    largest = blocks.abs().amax(dim=(1, 3))
    scale = torch.exp2(torch.ceil(torch.log2(largest / E4M3_MAX)))
    scale = torch.where(largest > 0, scale, torch.ones_like(scale))
    values = (blocks / scale[:, None, :, None]).view(align_up(weight.shape[0], BLOCK), -1)
    values = values[: weight.shape[0], : weight.shape[1]]
    return values.to(torch.float8_e4m3fn).contiguous(), scale


def restore_blocks(values: Tensor, scale: Tensor) -> Tensor:
    """The f32 matrix that (weight, weight_scale_inv) stand for."""
    wanted = tuple(div_ceil(size, BLOCK) for size in values.shape)
    if tuple(scale.shape) != wanted:
        raise BadInput(f"{tuple(values.shape)} needs scales {wanted}, got {tuple(scale.shape)}")
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return values.float() * spread[: values.shape[0], : values.shape[1]]
