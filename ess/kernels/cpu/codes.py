"""Weights that stay as integers of 4 or 8 bits: 32 inputs of an output share a scale and an offset.

A weight is code * scale + offset. Its products (csrc/cpu/ops/codes.h) read a quarter or half of the
bytes of bfloat16, and no weight is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from ess.errors import BadInput

GROUP_INPUTS: Final = 32
Bits = Literal[4, 8]


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A matrix [out, in]. `codes` are bytes: of 4 bits two to a byte, the even input in the low
    half, unsigned; of 8 bits signed. `steps` are float16 [out, group, (scale, offset)]."""

    codes: Tensor
    steps: Tensor
    bits: Bits

    def __post_init__(self) -> None:
        out_dim, width = self.codes.shape
        in_dim = width * 8 // self.bits
        wanted = out_dim, in_dim // GROUP_INPUTS, 2
        if in_dim % GROUP_INPUTS or self.steps.shape != wanted:
            raise BadInput(
                f"codes of {self.bits} bits for {out_dim} x {in_dim} weights need steps {wanted}"
                f" of whole groups of {GROUP_INPUTS}, got {tuple(self.steps.shape)}"
            )
        if self.codes.dtype != torch.uint8 or self.steps.dtype != torch.float16:
            raise BadInput(f"codes are {self.codes.dtype} and steps {self.steps.dtype}")
        if not self.steps.isfinite().all():
            raise BadInput("a scale or an offset of coded weights is not finite")

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.codes.shape[0], self.codes.shape[1] * 8 // self.bits))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def dtype(self) -> torch.dtype:
        """The type that the other factor of a product is rounded to."""
        return torch.bfloat16

    def plain(self) -> Tensor:
        """The matrix in bfloat16."""
        return self.exact().bfloat16()

    def exact(self) -> Tensor:
        """The matrix in float32."""
        scale, offset = self.steps.float().unsqueeze(-2).unbind(-1)
        grouped = self.numbers().float().view(*scale.shape[:2], GROUP_INPUTS)
        return (grouped * scale + offset).view(self.shape)

    def numbers(self) -> Tensor:
        """The codes, one by one."""
        if self.bits == 8:
            return self.codes.view(torch.int8)
        return torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1)


def joined(weights: Sequence[CodedWeight]) -> CodedWeight | None:
    """One matrix of the rows of all; None where their codes differ in size."""
    if len({weight.bits for weight in weights}) > 1:
        return None
    codes = torch.cat([weight.codes for weight in weights])
    return CodedWeight(codes, torch.cat([weight.steps for weight in weights]), weights[0].bits)
