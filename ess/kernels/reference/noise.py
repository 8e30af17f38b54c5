"""Noise by which a token is drawn: the greatest score with noise is a draw of the softmax.

It depends on a seed, a position and the token's id alone. It is an integer hash of 31 bits: chances
below 2^-31 of the best token's are never drawn.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ess.kernels.calls import Draws

UNIFORM_STEP: Final = (1.0 - 2.0**-23) / 2.0**31


def draw(scores: Tensor, draws: Draws, tokens: Tensor) -> None:
    keys = mixed_keys(draws.seeds, draws.positions)
    noisy = gumbel(keys, torch.arange(scores.shape[1], device=scores.device)) + scores
    tokens.copy_(torch.where(draws.top_k > 0, noisy.argmax(-1), tokens))


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """Noise float32 [rows, n] of token ids [n] or [rows, n], by the keys int32 [rows, 2]."""
    assert keys.shape[1] == 2, f"keys of shape {tuple(keys.shape)}"
    first, second = keys[:, :1], keys[:, 1:]
    mixed = ids.int() * -1640531527 ^ first
    mixed = _folded(mixed, 16).mul_(2146121005).add_(second)
    mixed = _folded(mixed, 15).mul_(-2073254261)
    mixed = _folded(mixed, 16) & 0x7FFFFFFF
    return mixed.float().add_(0.5).mul_(-UNIFORM_STEP).log1p_().neg_().log_().neg_()


def mixed_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    mixed = _mix(_mix(seeds) + positions)
    return torch.stack((mixed, mixed >> 32), dim=1).int()


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64; int64 products wrap."""
    x = (x ^ _shifted(x, 30)) * -4658895280553007687
    x = (x ^ _shifted(x, 27)) * -7723592293110705685
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """A logical shift to the right."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _folded(x: Tensor, by: int) -> Tensor:
    """int32, in place: x ^= x >> by, the shift a logical one."""
    return x.bitwise_xor_((x >> by).bitwise_and_((1 << (32 - by)) - 1))
