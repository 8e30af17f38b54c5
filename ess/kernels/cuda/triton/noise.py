"""The launch of what draws tokens from scores, which trusts what it is given."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from ess.kernels.calls import Draws
from ess.kernels.cuda.triton.device import noise as device
from ess.kernels.cuda.triton.launch import UNFUSED, on

BLOCK: Final = 4096


def draw_into(scores: Tensor, draws: Draws, tokens: Tensor, *, block: int = BLOCK) -> None:
    """`ess.kernels.cut.draw` by one program for a line."""
    count, width = scores.shape
    if not count:
        return
    with on(scores):
        device.draw[(count,)](
            *(scores, *draws, tokens, width, scores.stride(0)),
            BLOCK=block,
            num_warps=8,
            **UNFUSED,
        )
