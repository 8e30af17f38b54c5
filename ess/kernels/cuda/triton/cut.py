"""The launch of what cuts the scores of a vocabulary, which trusts what it is given."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ess.kernels.calls import Cuts
from ess.kernels.cuda.triton.device import cut as device
from ess.kernels.cuda.triton.launch import UNFUSED, on

ROOM: Final = 8192
SAMPLE: Final = 2048
BLOCK: Final = 4096
PART: Final = 512


def cut_into(
    scores: Tensor, cuts: Cuts, out: Tensor, *, room: int = ROOM, block: int = BLOCK
) -> None:
    """`ess.kernels.cut` by one program for a line. `room` is for candidates: a line that needs
    more of them is searched whole."""
    count, width = scores.shape
    shape = count, room if width > room else 1
    kept = torch.empty(shape, device=scores.device)
    positions = torch.empty(shape, dtype=torch.int32, device=scores.device)
    if not count:
        return
    with on(scores):
        device.cut[(count,)](
            *(scores, cuts.top_k.contiguous(), cuts.top_p.contiguous(), cuts.min_p.log()),
            *(out, kept, positions),
            *(width, scores.stride(0), out.stride(0)),
            ROOM=room,
            SAMPLE=min(SAMPLE, room),
            BLOCK=block,
            PART=min(PART, block),
            num_warps=8,
            **UNFUSED,
        )
