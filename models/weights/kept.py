"""A matrix that stays as its file has it: e4m3 values, one scale for each block of 128 x 128.

A product reads half the bytes of bfloat16. Which kernel makes it is decided where the weights are
loaded: `product` is one of the ops of the device that they lie on, or torch's, here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ess.models.weights.blocks import dequantise
from ess.models.weights.stored import QUANT_BLOCK

Product: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [n, k] in bfloat16 or float32, values [m, k], scales [m / 128, k / 128] -> [n, m]."""


def dequantised_product(x: Tensor, values: Tensor, scales: Tensor) -> Tensor:
    """In the type of `x`: the weights as that type has them."""
    return F.linear(x, dequantise(values, scales, dtype=x.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    values: Tensor
    scales: Tensor
    product: Product = dequantised_product

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    def to(self, device: torch.device, product: Product) -> Fp8Weight:
        return Fp8Weight(self.values.to(device), self.scales.to(device), product)

    def times(self, x: Tensor) -> Tensor:
        return self.product(x.bfloat16(), self.values, self.scales)

    def plain(self) -> Tensor:
        """In bfloat16."""
        return dequantise(self.values, self.scales, dtype=torch.bfloat16)


Weight: TypeAlias = Tensor | Fp8Weight


def plain(weight: Weight) -> Tensor:
    return weight.plain() if isinstance(weight, Fp8Weight) else weight


def stacked(weights: Sequence[Weight]) -> Weight:
    """One matrix of the rows of all: in blocks if they are, and if no block would hold rows of
    two."""
    blocked = [weight for weight in weights if isinstance(weight, Fp8Weight)]
    is_even = all(weight.shape[0] % QUANT_BLOCK == 0 for weight in weights[:-1])
    if len(blocked) < len(weights) or not is_even:
        return torch.cat([plain(weight) for weight in weights])
    values = torch.cat([weight.values for weight in blocked])
    scales = torch.cat([weight.scales for weight in blocked])
    return replace(blocked[0], values=values, scales=scales)
