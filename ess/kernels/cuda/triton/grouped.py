"""Products of tokens with the weights of their experts: the launch, which trusts what it is given.

A graph can hold it: how many tokens each expert has is read on the device.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
from torch import Tensor

from ess.kernels.cuda.triton.device import grouped as device
from ess.kernels.cuda.triton.launch import FORMS, FUSED, bits, on, place
from ess.layout import SCALE_GROUP
from ess.units import div_ceil

EXPERTS_MIN: Final = 32


class Shape(NamedTuple):
    """Tokens, columns of weights and depth of a product, programs for a multiprocessor, and why."""

    name: str
    tokens: int
    columns: int
    step: int
    warps: int
    stages: int
    programs: int
    reason: str


# fmt: off
EXACT: Final = Shape("exact", 16, 32, 32, 4, 1, 1, "float32 without tensor cores")
FEW: Final = Shape("few", 16, 128, 128, 4, 4, 2, "a program loads while the other multiplies")
FEW_ALONE: Final = Shape("few, alone", 16, 128, 128, 8, 5, 1, "as many bytes, one program")
FEW_PLAIN: Final = Shape("few, plain", 16, 128, 128, 4, 3, 2, "two fit with weights of two bytes")
SOME: Final = Shape("some", 64, 128, 128, 8, 4, 1, "weights once for what 16 would read four times")
MANY: Final = Shape("many", 128, 128, 128, 8, 3, 1, "as many products for a byte as registers hold")
# fmt: on

CANDIDATES: Final[dict[tuple[bool, int], tuple[Shape, ...]]] = {
    (True, 16): (FEW, FEW_ALONE),
    (True, 64): (SOME, FEW),
    (True, 128): (MANY, SOME),
    (False, 16): (FEW_PLAIN, FEW_ALONE),
    (False, 64): (SOME, FEW_PLAIN),
    (False, 128): (MANY, SOME),
}


def products_into(
    tokens: Tensor,
    ends: Tensor,
    weights: Tensor,
    *,
    out: Tensor,
    scales: Tensor | None = None,
    begin: Tensor | None = None,
    shape: Shape | None = None,
) -> Tensor:
    """By the contract of `Ops.expert_products`.

    The shape follows from the sizes of the tensors. With one shape, a token's bits do not depend on
    the other tokens; between two they agree within rounding.
    """
    experts, width = weights.shape[:2]
    if not out.numel() or not experts:
        return out
    where = place(tokens)
    is_half = in_half(tokens.dtype, weights.dtype)
    chosen = shape or candidates(len(tokens), experts, weights.dtype, is_half=is_half)[0]
    tasks = (div_ceil(len(tokens), chosen.tokens) + experts) * div_ceil(width, chosen.columns)
    with on(tokens):
        device.products[(min(tasks, chosen.programs * where.programs(tasks)),)](
            *(bits(tokens), ends if begin is None else begin, ends),
            *(bits(weights), ends if scales is None else scales, bits(out)),
            *(tokens.stride(0), out.stride(0), experts),
            HAS_BEGIN=begin is not None,
            **constants(weights, tokens.dtype, out.dtype, interpreted=where.interpreted),
            **tile(chosen),
            num_warps=chosen.warps,
            num_stages=where.stages(chosen.stages),
            **FUSED,
        )
    return out


def in_half(token_dtype: torch.dtype, weight_dtype: torch.dtype) -> bool:
    """Products in bfloat16, which holds e4m3 exactly."""
    return token_dtype == torch.bfloat16 and weight_dtype != torch.float32


def candidates(
    count: int, experts: int, weight_dtype: torch.dtype, *, is_half: bool
) -> tuple[Shape, ...]:
    """The shape in use first, for `count` tokens spread over the experts."""
    if not is_half:
        return (EXACT,)
    mean = div_ceil(count, experts)
    limit = next((tokens for tokens in (16, 64) if mean <= tokens), 128)
    return CANDIDATES[weight_dtype == torch.float8_e4m3fn, limit]


def constants(
    weights: Tensor, token_dtype: torch.dtype, out_dtype: torch.dtype, *, interpreted: bool
) -> dict[str, int | bool | str]:
    """What the kernel is compiled for, apart from block sizes."""
    experts, width, depth = weights.shape
    return {
        "EXPERTS": max(EXPERTS_MIN, triton.next_power_of_2(experts)),
        "WIDTH": width,
        "DEPTH": depth,
        "TOKEN_FORM": FORMS[token_dtype],
        "WEIGHT_FORM": FORMS[weights.dtype],
        "OUT_IS_BF16": out_dtype == torch.bfloat16,
        "IN_BF16": in_half(token_dtype, weights.dtype) and not interpreted,
        "INTERPRETED": interpreted,
        "PRECISION": "ieee",
    }


def tile(shape: Shape) -> dict[str, int]:
    assert SCALE_GROUP % shape.columns == 0, "a tile of columns has one scale"
    assert SCALE_GROUP % shape.step == 0, "and so has a step of the depth"
    return {"TOKENS": shape.tokens, "COLUMNS": shape.columns, "STEP": shape.step}
