"""Mixture of experts: a sigmoid gate limited to groups, routed experts, shared experts.

The three parts are separate calls so that a dispatch between ranks can stand between them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ess.kernels.cpu import stage as compiled
from ess.kernels.cpu.stage import Stage, Values, pack
from ess.models.config import ModelConfig
from ess.models.indexer import top_k
from ess.models.layers import Source, linear

GROUP_BEST: Final = 2


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


class Mlp:
    def __init__(self, source: Source, *, hidden_dim: int, inner_dim: int) -> None:
        gate = source.matrix("gate_proj", inner_dim, hidden_dim)
        self._gate_up = torch.cat((gate, source.matrix("up_proj", inner_dim, hidden_dim)))
        self._down = source.matrix("down_proj", hidden_dim, inner_dim)

    def __call__(self, x: Tensor) -> Tensor:
        return linear(swiglu(linear(x, self._gate_up)), self._down)

    def add_to(self, stage: Stage, normed: Values, hidden: Values) -> None:
        """`hidden` += the block of `normed`, as ops of a compiled stage."""
        inner = stage.gate(stage.linear(normed, pack(self._gate_up)))
        stage.add(stage.linear(inner, pack(self._down)), hidden)


class Routing(NamedTuple):
    """Which experts each token goes to, ascending [tokens, per_token], and with what weight."""

    experts: Tensor
    weights: Tensor


class Inner(NamedTuple):
    """Between the two products: a line per token and expert, sorted by expert; each one's end."""

    values: Tensor
    order: Tensor
    ends: Tensor


class Moe:
    def __init__(self, config: ModelConfig, source: Source) -> None:
        c = config
        self._config = c
        self._gate = source.matrix("gate", c.expert_count, c.hidden_dim).float()
        self._correction = source.vector("gate.e_score_correction_bias", c.expert_count)
        self._gate_up, self._down = _stack_experts(c, source.under("experts"))
        self._shared = None
        if c.shared_expert_count:
            self._shared = Mlp(
                source.under("shared_experts"),
                hidden_dim=c.hidden_dim,
                inner_dim=c.expert_dim * c.shared_expert_count,
            )

    def __call__(self, x: Tensor) -> Tensor:
        routed = self.routed(x, self.route(x))
        return routed if self._shared is None else routed + self.shared(x)

    def add_to(self, stage: Stage, normed: Values, hidden: Values) -> None:
        """`hidden` += the block of `normed`, as ops of a compiled stage."""
        c = self._config
        routing = compiled.Routing(
            per_token=c.experts_per_token,
            group_count=c.expert_group_count,
            groups_kept=c.expert_groups_kept,
            is_normed=c.expert_weights_normed,
            scale=c.expert_scale,
            correction=self._correction,
        )
        logits = stage.linear(normed, pack(self._gate))
        stage.experts(normed, logits, routing, pack(self._gate_up), pack(self._down), hidden)
        if self._shared is not None:
            self._shared.add_to(stage, normed, hidden)

    def route(self, x: Tensor) -> Routing:
        """The correction bias steers the choice of experts; their weights do without it."""
        c = self._config
        scores = F.linear(x.float(), self._gate).sigmoid()
        choice = scores + self._correction
        if c.expert_group_count > 1:
            choice = self._limit_groups(choice)
        experts = _best(choice, c.experts_per_token)
        weights = scores.gather(1, experts)
        if c.expert_weights_normed:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, weights * c.expert_scale)

    def _limit_groups(self, choice: Tensor) -> Tensor:
        """Groups rank by the sum of their two best experts; the others' experts are out."""
        groups = choice.view(choice.shape[0], self._config.expert_group_count, -1)
        strength = groups.topk(GROUP_BEST, -1).values.sum(-1)
        kept = torch.zeros_like(strength, dtype=torch.bool)
        kept.scatter_(1, _best(strength, self._config.expert_groups_kept), True)
        return groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)

    def routed(self, x: Tensor, routing: Routing) -> Tensor:
        """Tokens sorted by expert run as two grouped products; each token sums its own, in order.

        Sorting is stable and the sum runs over ascending experts in float32, so a token's result
        does not depend on which other tokens chose the same experts, beyond the products' rounding.
        """
        inner = self.up(x, routing)
        return self.collect(self.down(inner, range(self.expert_count)), inner, routing)

    @property
    def expert_count(self) -> int:
        return self._config.expert_count

    @property
    def has_shared(self) -> bool:
        return self._shared is not None

    def up(self, x: Tensor, routing: Routing) -> Inner:
        flat = routing.experts.flatten()
        order = flat.argsort(stable=True)
        ends = torch.bincount(flat, minlength=self.expert_count).cumsum(0).int()
        tokens = x.to(self._gate_up.dtype)[order // self._config.experts_per_token]
        both = F.grouped_mm(tokens, self._gate_up.transpose(1, 2), offs=ends)
        return Inner(swiglu(both.float()).to(both.dtype), order, ends)

    def down(self, inner: Inner, experts: range) -> Tensor:
        """What these experts make, one line per token that chose them, in the order of `inner`."""
        first = int(inner.ends[experts.start - 1]) if experts.start else 0
        ends = inner.ends[experts.start : experts.stop] - first
        lines = inner.values[first : first + int(ends[-1])]
        weights = self._down[experts.start : experts.stop].transpose(1, 2)
        return F.grouped_mm(lines, weights, offs=ends)

    def collect(self, outer: Tensor, inner: Inner, routing: Routing) -> Tensor:
        """Each token's weighted sum, float32, of what all its experts made for it."""
        placed = torch.empty_like(outer, dtype=torch.float32)
        placed[inner.order] = outer.float()
        weighted = placed.view(*routing.weights.shape, outer.shape[1]) * routing.weights[..., None]
        return weighted.sum(1)

    def shared(self, x: Tensor) -> Tensor:
        assert self._shared is not None, "this model has no shared experts"
        return self._shared(x)


def _best(scores: Tensor, count: int) -> Tensor:
    lengths = torch.full((scores.shape[0],), scores.shape[1], device=scores.device)
    return top_k(scores, lengths, count).long()


def _stack_experts(config: ModelConfig, source: Source) -> tuple[Tensor, Tensor]:
    """[experts, 2 * inner, hidden] and [experts, hidden, inner], filled one expert at a time."""
    inner, hidden = config.expert_dim, config.hidden_dim
    first = source.matrix("0.gate_proj", inner, hidden)
    gate_up = first.new_empty(config.expert_count, 2 * inner, hidden)
    down = first.new_empty(config.expert_count, hidden, inner)
    for number in range(config.expert_count):
        expert = source.under(str(number))
        gate_up[number, :inner] = expert.matrix("gate_proj", inner, hidden)
        gate_up[number, inner:] = expert.matrix("up_proj", inner, hidden)
        down[number] = expert.matrix("down_proj", hidden, inner)
    return gate_up, down
