"""Products with weights in fp8, made before there are requests where a library compiles programs
for them: so that no prompt and no step waits for a compiler.

A program is compiled for a weight's shape and for some of the numbers of tokens, which
`Backend.counts_to_build` lists. So one weight of each shape stands for all weights of that shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ess.clock import Clock
from ess.kernels.backend import ops
from ess.models.weights.kept import Fp8Weight

if TYPE_CHECKING:
    from ess.models.model import Model

MATRIX: Final = 2
EXPERTS: Final = 3
"""Dimensions of the weights of one product, and of those of all experts of a layer."""


@torch.inference_mode()
def build_ahead(model: Model, *, count_max: int, clock: Clock, tell: Callable[[str], None]) -> None:
    """Builds the programs for products of 1 to `count_max` tokens, and of the lines that their
    experts get. `tell` is given a line for each shape, since a first start may take minutes of
    which nothing else is seen."""
    started_s, weights = clock.now_s(), one_of_each_shape(model)
    for number, weight in enumerate(weights, start=1):
        if weight.values.is_cpu:
            continue
        most, counted = count_max, "tokens"
        if weight.values.dim() == EXPERTS:
            most, counted = count_max * _lines_of_token(model), "lines"
        counts = ops("cuda").backend.counts_to_build(weight.values, most)
        if not counts:
            continue
        tokens = torch.ones(counts[-1], weight.shape[-1], device=weight.device)
        for count in reversed(counts):
            _multiply(tokens[:count], weight)
        shape = " x ".join(map(str, weight.shape))
        tell(
            f"products in fp8: {shape} by up to {counts[-1]:,} {counted}, shape {number} of"
            f" {len(weights)}, {clock.now_s() - started_s:.1f} s"
        )


def _multiply(tokens: Tensor, weight: Fp8Weight) -> None:
    """Lines of experts are as even as they can be."""
    if weight.values.dim() == MATRIX:
        weight.times(tokens)
        return
    experts, width, _ = weight.shape
    ends = torch.arange(1, experts + 1, device=tokens.device) * len(tokens) // experts
    given, out = tokens.bfloat16(), tokens.new_empty(len(tokens), width, dtype=torch.bfloat16)
    ops("cuda").expert_products(given, ends.int(), weight.values, scales=weight.scales, out=out)


def _lines_of_token(model: Model) -> int:
    """Where ranks divide the experts, each has a line for each choice of any rank."""
    ranks = model.expert_ranks
    return model.config.experts_per_token * (1 if ranks is None else ranks.team.size)


def one_of_each_shape(model: object) -> list[Fp8Weight]:
    """The weights in fp8 that are multiplied with a model's tokens, one of each shape. A model is
    made of objects of `ess.models`, in tuples and lists. Weights of a layer's experts are stacked:
    a pair of tensors."""
    first_of: dict[torch.Size, Fp8Weight] = {}
    unseen, seen = [model], set[int]()
    while unseen:
        part = unseen.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Fp8Weight):
            first_of.setdefault(part.shape, part)
        elif isinstance(part, tuple) and part and _is_stack(*part):
            first_of.setdefault(part[0].shape, Fp8Weight(*part))
        elif isinstance(part, list | tuple):
            unseen.extend(part)
        elif type(part).__module__.startswith("ess.models."):
            unseen.extend(getattr(part, "__dict__", {}).values())
    return list(first_of.values())


def _is_stack(values: object, scales: object = None, *others: object) -> bool:
    """Whether these are the values and the scales of experts."""
    if others or not (isinstance(values, Tensor) and isinstance(scales, Tensor)):
        return False
    return values.dtype == torch.float8_e4m3fn and values.dim() == EXPERTS
