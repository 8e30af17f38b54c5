"""Weights in fp8 blocks: one scale per 128 x 128 values, the last block of a side partial."""

from __future__ import annotations

import torch

from ess.errors import BadInput
from ess.models.weights.dims import QUANT_BLOCK

_ROWS_AT_ONCE = 8 * QUANT_BLOCK


def dequantise(weight: torch.Tensor, scale: torch.Tensor, *, dtype: torch.dtype) -> torch.Tensor:
    """weight[r, c] * scale[r // 128, c // 128], the product in f32, rounded once to `dtype`.

    In bands of 1,024 rows, so that the f32 copy stays small beside a wide weight.
    """
    row_count, column_count = weight.shape
    out = torch.empty(row_count, column_count, dtype=dtype)
    for begin in range(0, row_count, _ROWS_AT_ONCE):
        end = min(begin + _ROWS_AT_ONCE, row_count)
        band = scale[begin // QUANT_BLOCK : -(-end // QUANT_BLOCK)]
        factors = band.repeat_interleave(QUANT_BLOCK, 1)[:, :column_count]
        factors = factors.repeat_interleave(QUANT_BLOCK, 0)[: end - begin]
        out[begin:end] = weight[begin:end].float().mul_(factors)
    return out


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
