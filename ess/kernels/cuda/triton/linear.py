"""Dense products in fp8: the launches, which trust what they are given."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ess.kernels.cuda.triton.device import linear as device
from ess.kernels.cuda.triton.launch import FUSED, bits, on, place
from ess.kernels.cuda.triton.rows import quantise
from ess.layout import SCALE_GROUP
from ess.units import div_ceil


class Shape(NamedTuple):
    """Tokens and columns of a program, whether tokens are the rows of its products, what Triton
    makes of it, and why."""

    name: str
    tokens: int
    columns: int
    turned: bool
    warps: int
    stages: int
    reason: str


# fmt: off
FEW: Final = Shape("few", 16, 64, False, 4, 6, "weights once, by as many programs as possible")
SOME: Final = Shape("some", 64, 64, True, 4, 5, "weights once for what 16 would read four times")
MANY: Final = Shape("many", 128, 128, True, 8, 4, "as many products for a byte as registers hold")
# fmt: on
SHAPES: Final = (FEW, SOME, MANY)


def linear_into(values: Tensor, weights: Tensor, scales: Tensor, out: Tensor) -> Tensor:
    """By the contract of `Ops.linear_fp8`. The shape follows from the number of tokens."""
    count, (width, depth) = len(values), weights.shape
    if not out.numel():
        return out
    spare = -depth % SCALE_GROUP
    codes, sizes = quantise(F.pad(values, (0, spare)) if spare else values)
    shape = next((shape for shape in SHAPES if count <= shape.tokens), MANY)
    where = place(values)
    with on(values):
        device.linear[(div_ceil(width, shape.columns), div_ceil(count, shape.tokens))](
            *(codes, sizes, bits(weights), scales, bits(out), count, out.stride(0)),
            **constants(width, depth, out.dtype, interpreted=where.interpreted),
            TOKENS=shape.tokens,
            COLUMNS=shape.columns,
            TURNED=shape.turned,
            num_warps=shape.warps,
            num_stages=where.stages(shape.stages),
            **FUSED,
        )
    return out


def constants(
    width: int, depth: int, out_dtype: torch.dtype, *, interpreted: bool
) -> dict[str, int | bool]:
    """What the kernel is compiled for, apart from block sizes."""
    return {
        "WIDTH": width,
        "DEPTH": depth,
        "CODED": div_ceil(depth, SCALE_GROUP) * SCALE_GROUP,
        "OUT_IS_BF16": out_dtype == torch.bfloat16,
        "INTERPRETED": interpreted,
    }
