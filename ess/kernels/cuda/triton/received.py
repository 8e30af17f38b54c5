"""`ess.kernels.received` on a device: the launches, which trust what they are given."""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor

from ess.kernels.cuda.triton.device import received as device
from ess.kernels.cuda.triton.launch import FUSED, UNFUSED, bits, on
from ess.units import div_ceil

COLUMNS_MAX: Final = 1024


def take_received(tokens: Tensor, lines: Tensor, ends: Tensor, out: Tensor) -> None:
    if not len(lines):
        return
    width = tokens.shape[1]
    with on(tokens):
        device.take[(len(lines),)](
            *(bits(tokens), lines, ends, bits(out), len(ends) - 1, tokens.stride(0)),
            WIDTH=width,
            COLUMNS=_columns(width),
            **FUSED,
        )


def gate_received(both: Tensor, ends: Tensor, limit: float, out: Tensor) -> None:
    if not len(both):
        return
    with on(both):
        device.gate[(len(both),)](
            *(bits(both), ends, bits(out), len(ends) - 1, float(limit)),
            WIDTH=out.shape[1],
            COLUMNS=_columns(out.shape[1]),
            HAS_LIMIT=limit > 0,
            IS_BF16=both.dtype == torch.bfloat16,
            **UNFUSED,
        )


def add_received(made: Tensor, places: Tensor, weights: Tensor, out: Tensor) -> None:
    if not len(places):
        return
    width = made.shape[1]
    with on(made):
        device.add[(len(places), div_ceil(width, _columns(width)))](
            *(bits(made), places, weights, bits(out), made.stride(0)),
            EACH=places.shape[1],
            WIDTH=width,
            COLUMNS=_columns(width),
            IS_BF16=made.dtype == torch.bfloat16,
            OUT_IS_BF16=out.dtype == torch.bfloat16,
            **UNFUSED,
        )


def _columns(width: int) -> int:
    return min(COLUMNS_MAX, int(triton.next_power_of_2(width)))
