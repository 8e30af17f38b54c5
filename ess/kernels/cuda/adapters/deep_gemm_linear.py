"""DeepGEMM's dense products in fp8.

Values are quantised here, 128 numbers to a scale of amax / 448, as our own products do it. Scales
are given as they are and laid out by the library. A probe compares with the reference over the same
codes; a GPU for which it would round scales to powers of two fails it.

DeepGEMM compiles a program for each layout of a product that it meets first (`layouts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ess.errors import BadInput, Unavailable
from ess.kernels.calls import Linear
from ess.kernels.checks import check_linear
from ess.kernels.cuda.adapters.deep_gemm import MODULES
from ess.kernels.cuda.adapters.deep_gemm_experts import (
    BOUND,
    WIDTH_UNIT,
    Coded,
    coded,
    unsigned,
    wrong_size,
)
from ess.kernels.cuda.adapters.layouts import counts_to_build
from ess.kernels.cuda.adapters.modules import Library, first_that
from ess.kernels.own import own_ops
from ess.layout import SCALE_GROUP, IndexCodec

FUNCTIONS: Final = ("fp8_gemm_nt",)
CODEC: Final = IndexCodec(scale_format="f32")
SERVES: Final = f"for weights of {WIDTH_UNIT} x {SCALE_GROUP} and multiples; else triton"


def load(device: torch.device, *, names: Sequence[str] = MODULES) -> DeepGemmLinear:
    """The first of these modules that is there and answers the probe."""
    return first_that(names, FUNCTIONS, lambda library: DeepGemmLinear(library, device))


class DeepGemmLinear:
    def __init__(self, library: Library, device: torch.device) -> None:
        self._module: Any = library.module
        self._ops = own_ops("cuda" if device.type == "cuda" else "reference")
        self._probe(device)
        self.line = f"{library.line}, {SERVES}"

    def takes(self, call: Linear) -> bool:
        return wrong_size(call.weights) is None

    def counts_to_build(self, weights: Tensor, count_max: int) -> list[int]:
        return [] if wrong_size(weights) else counts_to_build(count_max)

    def linear_fp8(
        self, values: Tensor, weights: Tensor, scales: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """By the contract of `Ops.linear_fp8`, but that results are rounded to bfloat16; a graph
        can hold it."""
        check_linear(values, weights, scales, out)
        refusal = wrong_size(weights)
        if refusal:
            raise BadInput(refusal)
        shape = len(values), len(weights)
        room = values.new_empty(shape, dtype=torch.float32) if out is None else out
        if not len(values):
            return room
        return room.copy_(self._run(coded(self._ops, values, CODEC), weights, scales))

    def _run(self, given: Coded, weights: Tensor, scales: Tensor) -> Tensor:
        shape = len(given.codes), len(weights)
        products = torch.empty(shape, dtype=torch.bfloat16, device=weights.device)
        self._module.fp8_gemm_nt(tuple(given), (weights, scales), products)
        return products

    def _probe(self, device: torch.device) -> None:
        """The same codes go to the reference. What is left is the rounding of the result and of
        sums of 128, which together stay below `BOUND` of the products' sizes."""
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(192, 384, generator=generator).to(torch.float8_e4m3fn).to(device)
        scales = (torch.rand(2, 3, generator=generator) + 0.5).to(device)
        asked = coded(self._ops, torch.randn(5, 384, generator=generator).to(device), CODEC)
        plain = asked.codes.float() * asked.scales.repeat_interleave(SCALE_GROUP, 1)
        ends = torch.tensor([5], dtype=torch.int32, device=device)
        products = own_ops("reference").expert_products
        want = products(plain, ends, weights[None], scales=scales[None])
        sizes = products(plain.abs(), ends, unsigned(weights)[None], scales=scales[None])
        error = float(((self._run(asked, weights, scales) - want).abs() / sizes).max())
        if not error <= BOUND:
            raise Unavailable(f"the probe failed: products are wrong by {error}, due {BOUND}")
