"""A matrix that stays as its file has it: e4m3 values, one scale for each block of 128 x 128, or
codes of 4 or 8 bits (`ess.kernels.cpu.codes`).

A product reads half the bytes of bfloat16 or fewer; it is made by the ops of the device that has
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ess.kernels.backend import ops
from ess.kernels.cpu import codes
from ess.kernels.cpu.codes import CodedWeight
from ess.models.weights.blocks import dequantise
from ess.models.weights.stored import QUANT_BLOCK


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    def to(self, device: torch.device) -> Fp8Weight:
        return Fp8Weight(self.values.to(device), self.scales.to(device))

    def times(self, x: Tensor) -> Tensor:
        """The product in float32."""
        computes = ops("cpu" if self.values.is_cpu else "cuda")
        return computes.linear_fp8(x, self.values, self.scales)

    def plain(self) -> Tensor:
        """The weight in bfloat16."""
        return dequantise(self.values, self.scales, dtype=torch.bfloat16)


Weight: TypeAlias = Tensor | Fp8Weight | CodedWeight


def plain(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.plain()


def packable(weight: Weight) -> Tensor | CodedWeight:
    """The weight as compiled stages take it: codes stay codes."""
    return weight if isinstance(weight, CodedWeight) else plain(weight)


def lengthened(weight: Weight, rows: int) -> Weight:
    """The weight with `rows` more rows of zeros."""
    if not isinstance(weight, CodedWeight):
        return F.pad(plain(weight), (0, 0, 0, rows))
    steps = F.pad(weight.steps, (0, 0, 0, 0, 0, rows))
    return CodedWeight(F.pad(weight.codes, (0, 0, 0, rows)), steps, weight.bits)


def stacked(weights: Sequence[Weight]) -> Weight:
    """One matrix of the rows of all: in blocks if they are, and if no block would hold rows of
    two; as codes of one size."""
    coded = [weight for weight in weights if isinstance(weight, CodedWeight)]
    if len(coded) == len(weights) and (whole := codes.joined(coded)) is not None:
        return whole
    blocked = [weight for weight in weights if isinstance(weight, Fp8Weight)]
    is_even = all(weight.shape[0] % QUANT_BLOCK == 0 for weight in weights[:-1])
    if len(blocked) < len(weights) or not is_even:
        return torch.cat([plain(weight) for weight in weights])
    values = torch.cat([weight.values for weight in blocked])
    scales = torch.cat([weight.scales for weight in blocked])
    return Fp8Weight(values, scales)
