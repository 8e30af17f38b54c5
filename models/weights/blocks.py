"""DeepSeek's fp8 weights: e4m3 values, one f32 scale per block of 128 x 128, edges partial.

Our own files have scales that are powers of two, rounded up, so that a block never saturates and
its scale is exact in any format; an empty block gets the scale 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from ess.errors import BadInput
from ess.models.weights.stored import QUANT_BLOCK
from ess.units import align_up

# Below this many values torch works in the calling thread. Waking others for a small weight costs
# more than the work, and on a busy machine a hundred times more.
_ONE_THREAD_VALUES: Final = 32_768
_SMALL_VALUES: Final = 1 << 20
E4M3_MAX: Final = 448.0


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as (e4m3 values, f32 scales): weight = value * scale of its block."""
    if weight.dim() != 2 or not weight.isfinite().all():
        raise BadInput(f"need a finite matrix, got {tuple(weight.shape)}")
    blocks = _blocked(weight.float())
    largest = blocks.abs().amax(dim=(1, 3))
    scale = torch.exp2(torch.ceil(torch.log2(largest / E4M3_MAX)))
    scale = torch.where(largest > 0, scale, torch.ones_like(scale))
    values = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)
    values = values[: weight.shape[0], : weight.shape[1]]
    return values.to(torch.float8_e4m3fn).contiguous(), scale


def _blocked(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] padded with zeros and viewed as [out block, 128, in block, 128]."""
    rows, columns = weight.shape
    padded = weight.new_zeros(align_up(rows, QUANT_BLOCK), align_up(columns, QUANT_BLOCK))
    padded[:rows, :columns] = weight
    return padded.view(
        padded.shape[0] // QUANT_BLOCK, QUANT_BLOCK, padded.shape[1] // QUANT_BLOCK, QUANT_BLOCK
    )


def dequantise(weight: torch.Tensor, scale: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """weight[r, c] * scale[r // 128, c // 128], the product in f32, rounded once to `dtype`.

    Band by band of rows within one row of blocks, so that the f32 copy stays small.
    """
    row_count, column_count = weight.shape
    out = torch.empty(row_count, column_count, dtype=dtype, device=weight.device)
    for begin, end in _bands(row_count, column_count):
        factors = scale[begin // QUANT_BLOCK].repeat_interleave(QUANT_BLOCK)[:column_count]
        out[begin:end] = weight[begin:end].float().mul_(factors)
    return out


def _bands(row_count: int, column_count: int) -> Iterator[tuple[int, int]]:
    step = QUANT_BLOCK
    if row_count * column_count < _SMALL_VALUES:
        step = max(1, min(step, _ONE_THREAD_VALUES // max(column_count, 1)))
    for block in range(0, row_count, QUANT_BLOCK):
        block_end = min(block + QUANT_BLOCK, row_count)
        for begin in range(block, block_end, step):
            yield begin, min(begin + step, block_end)


def as_scale(stored: torch.Tensor, *, what: str) -> torch.Tensor:
    """Scales as f32, from f32 or from bare exponents; each finite and positive, or BadInput."""
    if stored.dtype == torch.uint8:
        stored = stored.view(torch.float8_e8m0fnu)
    scale = stored.float()
    bad = ~(torch.isfinite(scale) & (scale > 0))
    if bool(bad.any()):
        row, column = (int(i) for i in bad.nonzero()[0])
        raise BadInput(
            f"{what} has the scale {scale[row, column].item()} at block [{row}, {column}]"
            f" ({int(bad.sum())} such blocks); a scale is finite and positive"
        )
    return scale
