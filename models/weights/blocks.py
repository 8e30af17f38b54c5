"""Weights in fp8 blocks: one scale per 128 x 128 values, the last block of a side partial."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from ess.errors import BadInput
from ess.models.weights.dims import QUANT_BLOCK

# Below this many values torch works in the calling thread. Waking others for a small weight costs
# more than the work, and on a busy machine a hundred times more.
_ONE_THREAD_VALUES: Final = 32_768
_SMALL_VALUES: Final = 1 << 20


def dequantise(weight: torch.Tensor, scale: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """weight[r, c] * scale[r // 128, c // 128], the product in f32, rounded once to `dtype`.

    Band by band of rows within one row of blocks, so that the f32 copy stays small.
    """
    row_count, column_count = weight.shape
    out = torch.empty(row_count, column_count, dtype=dtype)
    for begin, end in _bands(row_count, column_count):
        factors = scale[begin // QUANT_BLOCK].repeat_interleave(QUANT_BLOCK)[:column_count]
        out[begin:end] = weight[begin:end].float().mul_(factors)
    return out


def _bands(row_count: int, column_count: int) -> Iterator[tuple[int, int]]:
    step = QUANT_BLOCK
    if row_count * column_count < _SMALL_VALUES:
        step = max(1, min(step, _ONE_THREAD_VALUES // column_count))
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
