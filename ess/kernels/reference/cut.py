"""Scores cut by their order: the truth that a kernel without a sort is held to."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from ess.kernels.calls import Cuts

LOWEST: Final = -45.0
"""A score that lies so many doublings below the best has no share."""
NEAR: Final = 1e-30
LOG2_E: Final = 1.4426950408889634
POWERS: Final = (
    *(1.4142135623730951, 0.9802581434685472, 0.3397315841830749, 0.07849466324122069),
    *(0.013602088628663626, 0.0018856498765369369, 0.00021783881590746446),
    2.157062300896799e-05,
)
"""2^t by powers of t - 1/2: sqrt 2 times (ln 2)^i / i!."""


def cut_sorted(scores: Tensor, cuts: Cuts, out: Tensor) -> None:
    top_k, top_p, min_p = (part[:, None] for part in cuts)
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    best, rank = values[:, :1], torch.arange(scores.shape[1], device=scores.device)
    shares = _shares(values, best)
    summed = shares.cumsum(-1)
    last = top_k.clamp(1, scores.shape[1]) - 1
    allowed = top_p.double() * summed.gather(-1, last).double()
    kept = (rank < top_k) & ((summed - shares).double() < allowed)
    kept &= (values >= best + min_p.log()) & (values > -math.inf) & best.isfinite()
    kept[:, 0] = True
    kept = (~kept).cumsum(-1) == 0
    out.scatter_(-1, ids, values.masked_fill(~kept, -math.inf))


def _shares(values: Tensor, best: Tensor) -> Tensor:
    """int64: 2^44 for the best, and for what is nearer to it than NEAR: a device may take such a
    number for none, and would round its power another way."""
    doublings = ((values - best) * LOG2_E).clamp(min=LOWEST).nan_to_num(LOWEST)
    doublings = doublings.masked_fill(doublings > -NEAR, 0.0)
    whole = doublings.floor()
    part = doublings - whole - 0.5
    mantissa = torch.full_like(part, POWERS[-1])
    for power in POWERS[-2::-1]:
        mantissa = mantissa * part + power
    return (mantissa * ((whole.int() + (127 + 44)) << 23).view(torch.float32)).long()
