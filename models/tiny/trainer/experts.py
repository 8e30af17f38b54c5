"""The mixture of experts in its training form: a gate, and all routed experts as one function.

Tokens are sorted by expert once; every expert then works on one contiguous slice, and both
directions of the permutation are gathers (a scatter-add would be the slowest thing in the step).
The backward pass is written out, because the slices would otherwise each be a node of the graph.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ess.models.tiny.trainer.fuse import fused
from ess.models.tiny.trainer.shape import ModelShape

BALANCE_RATE = 1e-3


@fused
def swiglu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


@fused
def swiglu_backward(both: Tensor, grad: Tensor) -> Tensor:
    gate, up = both.float().chunk(2, -1)
    wide = grad.float()
    chance = torch.sigmoid(gate)
    through_gate = wide * up * chance * (1 + gate * (1 - chance))
    return torch.cat((through_gate, wide * gate * chance), -1).to(both.dtype)


def _each(rows: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """rows of expert e times weights[e] transposed, all in one output."""
    out = rows.new_empty(rows.shape[0], weights.shape[1])
    parts = zip(torch.split(rows, counts), weights, torch.split(out, counts), strict=True)
    for part, weight, into in parts:
        torch.mm(part, weight.t(), out=into)
    return out


def _each_back(
    grad: Tensor, rows: Tensor, weights: Tensor, counts: list[int]
) -> tuple[Tensor, Tensor]:
    """The gradients of `_each` by its rows and by its weights."""
    by_rows, by_weights = torch.empty_like(rows), torch.empty_like(weights)
    parts = (torch.split(tensor, counts) for tensor in (grad, rows, by_rows))
    for at, (grad_part, part, into) in enumerate(zip(*parts, strict=True)):
        torch.mm(grad_part, weights[at], out=into)
        torch.mm(grad_part.t(), part, out=by_weights[at])
    return by_rows, by_weights


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, share: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        counts = torch.bincount(flat, minlength=gate_up.shape[0]).tolist()
        token = order // chosen.shape[1]
        rows = x[token]
        both = _each(rows, gate_up, counts)
        active = swiglu(both)
        products = _each(active, down, counts)
        ctx.save_for_backward(
            rows, both, active, products, share, order, back, token, gate_up, down
        )
        ctx.counts = counts
        return (products[back].view(*chosen.shape, -1) * share[..., None].to(x.dtype)).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, both, active, made, share, order, back, token, gate_up, down = ctx.saved_tensors
        grad = grads[0]
        shape = (*share.shape, -1)
        by_share = (made[back].view(shape) * grad[:, None]).sum(-1, dtype=torch.float32)
        by_made = grad[token] * share.flatten()[order][:, None].to(grad.dtype)
        by_active, by_down = _each_back(by_made, active, down, ctx.counts)
        by_both = swiglu_backward(both, by_active)
        by_rows, by_gate_up = _each_back(by_both, rows, gate_up, ctx.counts)
        return by_rows[back].view(shape).sum(1), by_share, None, by_gate_up, by_down


class Gate(nn.Module):
    """Group-limited sigmoid gate; the correction bias balances the load and learns nothing."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.randn(shape.expert_count, shape.hidden) * 0.02)
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.expert_count))
        self.e_score_correction_bias: Tensor
        self.load: Tensor | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.shape
        score = F.linear(x.float(), self.weight.float()).sigmoid()
        choice = (score + self.e_score_correction_bias).detach()
        grouped = choice.view(-1, shape.group_count, shape.expert_count // shape.group_count)
        group_score = grouped.topk(min(2, grouped.shape[-1]), -1)[0].sum(-1)
        kept = torch.zeros_like(group_score)
        kept.scatter_(1, group_score.topk(shape.groups_kept, -1)[1], 1.0)
        choice = grouped.masked_fill(kept[..., None] == 0, float("-inf")).flatten(1)
        chosen = choice.topk(shape.experts_per_token, -1)[1]
        share = score.gather(1, chosen)
        if self.load is not None and self.weight.requires_grad:
            self.load += torch.bincount(chosen.flatten(), minlength=shape.expert_count)
        return share / (share.sum(-1, keepdim=True) + 1e-20), chosen


def balance(biases: Tensor, loads: Tensor) -> None:
    """One step of every gate's correction bias [gate, expert] against the load it was given."""
    biases += BALANCE_RATE * torch.sign(loads.mean(-1, keepdim=True) - loads)


class Mlp(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner)  # type: ignore[no-any-return]


class Moe(nn.Module):
    """Routed experts, stacked as [expert, out, in], beside one shared expert."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        count, width, hidden = shape.expert_count, shape.expert_width, shape.hidden
        self.gate = Gate(shape)
        self.gate_up = nn.Parameter(torch.empty(count, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, width))
        self.shared_experts = Mlp(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        share, chosen = self.gate(flat)
        run = _Experts.apply
        routed = run(flat, share, chosen, self.gate_up, self.down)  # type: ignore[no-untyped-call]
        return (routed + self.shared_experts(flat)).view(x.shape)  # type: ignore[no-any-return]
