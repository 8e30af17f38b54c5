"""What an expert's rank does beside its products: tokens of other ranks come in, sums go out.

There is a line for every pair of a token and an expert that any rank has sent, and most are of
experts elsewhere: they lie behind the last of `ends`. How many that is only the device knows, so
these ops look there, and neither read nor write what lies behind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ess.kernels.backend import ops
from ess.kernels.calls import Backend


def taken(tokens: Tensor, lines: Tensor, ends: Tensor) -> Tensor:
    """Line i of the result is the token of `lines[i]`, int64, up to the last end."""
    assert lines.dim() == 1, f"lines of shape {tuple(lines.shape)}"
    out = tokens.new_empty(len(lines), tokens.shape[1])
    _backend(tokens).take_received(tokens.contiguous(), lines, ends, out)
    return out


def gated(both: Tensor, ends: Tensor, limit: float) -> Tensor:
    """`experts.swiglu` of the lines up to the last end, in float32, rounded to the type of both."""
    out = both.new_empty(len(both), both.shape[1] // 2)
    _backend(both).gate_received(both.contiguous(), ends, limit, out)
    return out


def added(made: Tensor, places: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Each token's weighted sum [tokens, width] of its lines of `made`, in order, in float32 before
    it is rounded: `places` [tokens, n], int64, says which lines; -1 stands for no line."""
    assert places.shape == weights.shape, f"{tuple(places.shape)} places, {weights.shape} weights"
    out = made.new_empty(len(places), made.shape[1], dtype=dtype)
    _backend(made).add_received(made.contiguous(), places.contiguous(), weights.contiguous(), out)
    return out


def _backend(tensor: Tensor) -> Backend:
    return ops("cuda" if tensor.is_cuda else "reference").backend
