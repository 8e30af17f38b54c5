"""What top-k, top-p and min-p leave of the scores that a token is drawn from, and the draw.

Each limit drops tokens from what the one before left, in the order of the scores: best first, by
id where they are equal. So what is left is a first part of that order. Its end is the same on every
device: shares are whole units of 2^-44 of the best token's, whose sums no order can change, and
they are made by additions and multiplications that all devices round alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ess.kernels.backend import ops
from ess.kernels.calls import Cuts, Draws


def cut(scores: Tensor, cuts: Cuts) -> Tensor:
    """Scores float32 [n, vocabulary], and -inf for what is dropped; the best token is always left.

    If the greatest score of a line is not finite, the first token with that score is left.
    """
    assert scores.dtype == torch.float32, f"scores in {scores.dtype}"
    assert all(len(part) == len(scores) for part in cuts), f"{len(scores)} lines of scores"
    out = torch.empty_like(scores)
    ops("cuda" if scores.is_cuda else "reference").backend.cut(scores, cuts, out)
    return out


def draw(scores: Tensor, draws: Draws, tokens: Tensor) -> None:
    """Writes to `tokens` int64 [n] the id of the greatest score with noise, the first of equals; a
    NaN is above all else. `ess.kernels.reference.noise` says which noise. Tokens of lines that are
    not drawn stay."""
    assert scores.dtype == torch.float32, f"scores in {scores.dtype}"
    assert all(len(part) == len(scores) for part in draws), f"{len(scores)} lines of scores"
    ops("cuda" if scores.is_cuda else "reference").backend.draw(scores, draws, tokens)
