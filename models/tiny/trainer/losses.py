"""Losses over the vocabulary, a slice of tokens at a time.

The logits of a batch would be the largest tensor of the step. Both functions make them slice by
slice, take the gradient at once and keep only [token, hidden] and [vocabulary, hidden].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ess.models.tiny.trainer.fuse import fused

SLICE = 512


@fused
def slope(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross entropy and its gradient by the logits."""
    wide = logits.float()
    logs = wide - wide.logsumexp(-1, keepdim=True)
    picked = logs.gather(1, target[:, None])
    hot = torch.arange(logs.shape[1], device=logs.device) == target[:, None]
    return -picked.sum(), (logs.exp() - hot.float()).to(logits.dtype)


@fused
def soft_slope(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Summed KL(softmax(wanted) || softmax(logits)) and its gradient by the logits."""
    logs = logits.float().log_softmax(-1)
    aim = wanted.float().log_softmax(-1)
    chance = aim.exp()
    return (chance * (aim - logs)).sum(), (logs.exp() - chance).to(logits.dtype)


class _CrossEntropy(torch.autograd.Function):
    """`target` holds token ids, or hidden states whose logits are the distribution wanted."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
        soft = target.dim() == 2
        by_hidden = torch.empty_like(hidden)
        by_head = torch.zeros_like(head, dtype=torch.float32)
        total = torch.zeros((), device=hidden.device)
        for at in range(0, hidden.shape[0], SLICE):
            part = hidden[at : at + SLICE]
            aim = target[at : at + SLICE]
            logits = part @ head.t()
            loss, by_logits = soft_slope(logits, aim @ head.t()) if soft else slope(logits, aim)
            torch.mm(by_logits, head, out=by_hidden[at : at + SLICE])
            by_head += by_logits.t() @ part
            total = total + loss
        ctx.save_for_backward(by_hidden, by_head)
        ctx.count = hidden.shape[0]
        return total / hidden.shape[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        by_hidden, by_head = ctx.saved_tensors
        share = grads[0] / ctx.count
        return by_hidden * share.to(by_hidden.dtype), (by_head * share).to(by_hidden.dtype), None


def cross_entropy(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """Mean nats per token, with gradients to the hidden states and the head."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        flat, head, target.reshape(-1)
    )
    return loss


def soft_cross_entropy(hidden: Tensor, head: Tensor, teacher: Tensor) -> Tensor:
    """Mean KL from the distribution that the teacher's hidden states have under the same head."""
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), teacher.reshape(-1, teacher.shape[-1])
    return _CrossEntropy.apply(flat, head, wanted)  # type: ignore[no-any-return,no-untyped-call]


@torch.no_grad()
def token_nats(hidden: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """Nats of every target token, fp32, for measuring."""
    flat, wanted = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    parts = [
        F.cross_entropy(
            F.linear(flat[at : at + SLICE].float(), head.float()),
            wanted[at : at + SLICE],
            reduction="none",
        )
        for at in range(0, flat.shape[0], SLICE)
    ]
    return torch.cat(parts).view(target.shape)
