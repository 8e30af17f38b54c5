"""Partials over disjoint parts of a selection make one partial.

A partial is (out, lse): float32, lse in natural logarithm, and where nothing was attended
lse = -inf and out = 0. With m = max(lse), w_i = exp(lse_i - m):

    out = (w_0 out_0 + w_1 out_1) / (w_0 + w_1),    lse = m + log(w_0 + w_1)

The weights are divided before they multiply, so that outs near the end of float32 cannot overflow.
Both sums are of two terms, so merge(a, b) and merge(b, a) are the same bits. A side that is empty
is computed (two of them give NaN) and passed over: the other comes back bit for bit, its negative
zeros too.

An lse of +inf gives NaN on purpose: some libraries write +inf where nothing was attended, or
logarithms of base 2, and `adapt` converts those where they enter.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ess.errors import BadInput
from ess.kernels.checks import SINGLE, require


class Partial(NamedTuple):
    """Attention over a part of a selection: out [..., value_dim] and lse [...], float32."""

    out: Tensor
    lse: Tensor


Pair = tuple[Tensor, Tensor]


def merge(first: Pair, second: Pair, *others: Pair, into: Partial | None = None) -> Partial:
    """Attention over the parts of a selection, from attention over each part: hits, places, misses.

    Each part is a pair (out, lse): out [..., value_dim] and lse [...] (one value for each row of
    `out`, no dimension kept), float32, lse in natural logarithm. A part in which nothing was
    attended has out = 0 and lse = -inf. `ess.kernels.merge.adapt` converts what other libraries
    give: base 2, +inf for nothing, other float types. `into` may be one of the parts.
    """
    first, second = check_merge(first, second, into)
    last = second
    for number, other in enumerate(others, start=3):
        added = side(f"part {number}", other, first.out.shape)
        first, last = _combined(first, last), added
    into = into or like(first)
    combine(first, last, into)
    return into


def _combined(first: Partial, second: Partial) -> Partial:
    fresh = like(first)
    combine(first, second, fresh)
    return fresh


def like(partial: Partial) -> Partial:
    """Room for another of its sizes."""
    return Partial(torch.empty_like(partial.out), torch.empty_like(partial.lse))


def check_merge(first: Pair, second: Pair, into: Partial | None) -> tuple[Partial, Partial]:
    """The two sides, which are pairs of tensors of one size, and so is `into`."""
    sides = side("first", first), side("second", second, first[0].shape)
    if into is not None:
        side("into", into, first[0].shape)
    return sides


def side(name: str, side: Any, shape: torch.Size | None = None) -> Partial:
    if not isinstance(side, tuple) or len(side) != 2:
        raise BadInput(f"{name} is {type(side).__name__}, must be a pair (out, lse)")
    out, lse = side
    if shape is None and isinstance(out, Tensor) and out.ndim:
        shape = out.shape
    require(f"{name}.lse", lse, None if shape is None else shape[:-1], SINGLE)
    require(f"{name}.out", out, shape or (*lse.shape, None), SINGLE)
    return Partial(out, lse)


def combine(first: Partial, second: Partial, into: Partial) -> None:
    """`merge` in torch, of sides that have been checked."""
    first_empty, second_empty = first.lse == -math.inf, second.lse == -math.inf
    top = torch.maximum(first.lse, second.lse)
    first_weight, second_weight = (first.lse - top).exp_(), (second.lse - top).exp_()
    total = first_weight + second_weight
    lse = torch.log(total).add_(top)
    out = first.out * (first_weight / total)[..., None]
    out += second.out * (second_weight / total)[..., None]
    out = torch.where(first_empty[..., None], second.out, out)
    torch.where(second_empty[..., None], first.out, out, out=into.out)
    lse = torch.where(first_empty, second.lse, lse)
    torch.where(second_empty, first.lse, lse, out=into.lse)


def adapt(
    out: Tensor, lse: Tensor, *, base: Literal["e", "2"] = "e", empty: Literal["-inf", "+inf"]
) -> Partial:
    """A partial of another library: its base, its mark of nothing attended, any float type."""
    if base not in ("e", "2") or empty not in ("-inf", "+inf"):
        raise BadInput(f"base {base!r} and empty {empty!r} must be 'e' or '2', '-inf' or '+inf'")
    lse = lse.float() * (math.log(2) if base == "2" else 1.0)
    nothing = lse == float(empty)
    return Partial(
        out.float().masked_fill(nothing[..., None], 0.0), lse.masked_fill(nothing, -math.inf)
    )
