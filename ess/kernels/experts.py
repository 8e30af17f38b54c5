"""Experts of a layer: tokens to their experts, two grouped products, and back.

How many tokens an expert has is never known to the host. Sorting is stable and each token sums what
its own experts made, ascending, in float32: it depends on no other token.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = tuple[Tensor, Tensor | None]


class ExpertProducts(Protocol):
    """`Ops.expert_products`, or another function of the same contract."""

    def __call__(
        self, tokens: Tensor, ends: Tensor, weights: Tensor, *, scales: Tensor | None
    ) -> Tensor: ...


class Sorted(NamedTuple):
    """Pairs of a token and one of its experts by expert: which pair, and where each expert ends."""

    order: Tensor
    ends: Tensor


def by_expert(chosen: Tensor, expert_count: int) -> Sorted:
    """Sorts choices [n, per_token] by expert."""
    experts, order = chosen.flatten().sort(stable=True)
    numbers = torch.arange(expert_count, device=chosen.device)
    return Sorted(order, torch.searchsorted(experts, numbers, right=True, out_int32=True))


def places_in(order: Tensor) -> Tensor:
    """Where each pair stands among those that are sorted."""
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return places


def swiglu(gate_up: Tensor, limit: float = 0.0) -> Tensor:
    """A `limit` that is not 0 bounds both sides, the gate from above alone."""
    gate, up = gate_up.chunk(2, -1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def product_type(weights: Tensor) -> torch.dtype:
    """The type in which tokens are multiplied: that of the weights, or bfloat16 for codes."""
    return torch.bfloat16 if weights.dtype == torch.float8_e4m3fn else weights.dtype


def collected(outer: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Each token's weighted sum of what all its experts made, given by expert."""
    placed = torch.empty_like(outer, dtype=torch.float32)
    placed[order] = outer.float()
    return summed(placed.view(*weights.shape, outer.shape[1]), weights)


def summed(made: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum over each token's experts, whose outputs are float32 [n, per_token,
    width]."""
    return (made * weights[..., None]).sum(1)


def experts(
    products: ExpertProducts,
    tokens: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Weights,
    down: Weights,
    limit: float = 0.0,
) -> Tensor:
    """Each token's sum, float32 [n, depth], of what its experts make of it.

    `chosen` [n, per_token] names them ascending; `weights` says how much each counts. An expert is
    gate_up [2 * inner, depth], silu of the first half times the second, then down [depth, inner];
    in e4m3 both have scales, as `Ops.expert_products` takes them.
    """
    order, ends = by_expert(chosen, len(gate_up[0]))
    asked = tokens.to(product_type(gate_up[0]))[order // chosen.shape[1]]
    both = products(asked, ends, gate_up[0], scales=gate_up[1])
    inner = swiglu(both.float(), limit).to(both.dtype)
    return collected(products(inner, ends, down[0], scales=down[1]), order, weights)
