"""A plain gather for a device that has Triton and nothing else: the rows of a list, in place."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ess.errors import BadInput
from ess.kernels.cuda.triton.device import copy as device
from ess.kernels.cuda.triton.launch import on

WORD_BYTES: Final = 8
BLOCK: Final = 4096


def copy_rows(
    source: Tensor,
    source_rows: Tensor,
    target: Tensor,
    target_rows: Tensor,
    count: Tensor,
    *,
    programs: int = 4,
) -> None:
    """Row source_rows[i] of pinned or device memory to row target_rows[i], for i < count[0].

    The count lies on the device, so one captured launch serves any number of rows.
    """
    words = []
    for name, matrix in (("source", source), ("target", target)):
        if matrix.shape[1] % WORD_BYTES or matrix.stride(0) % WORD_BYTES:
            raise BadInput(f"{name} rows of {matrix.shape[1]} bytes are not words of {WORD_BYTES}")
        words.append(matrix.view(torch.int64))
    with on(target):
        device.copy_rows[(programs,)](
            *(*words, source_rows, target_rows, count, words[0].stride(0), words[1].stride(0)),
            WORDS=words[0].shape[1],
            BLOCK=BLOCK,
            num_warps=16,
        )
