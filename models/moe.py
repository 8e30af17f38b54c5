"""Mixture of experts: a sigmoid gate limited to groups, routed experts, shared experts.

The three parts are separate calls so that a dispatch between ranks can stand between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ess.comm.experts.expert_ranks import ExpertExchange, ExpertRanks, Part, Received
from ess.kernels import experts as routed
from ess.kernels.backend import ops
from ess.kernels.cpu import stage as compiled
from ess.kernels.cpu.stage import Stage, Values, pack
from ess.kernels.experts import Weights, swiglu
from ess.kernels.received import added, gated, taken
from ess.models.config import ModelConfig
from ess.models.indexer import top_k
from ess.models.layers import Source, linear
from ess.models.weights.kept import Fp8Weight, Weight, packable, plain, stacked

GROUP_BEST: Final = 2


class Mlp:
    def __init__(
        self, source: Source, *, hidden_dim: int, inner_dim: int, limit: float = 0.0
    ) -> None:
        self._gate_up = _gate_up(source, hidden_dim, inner_dim)
        self._down = source.weight("down_proj", hidden_dim, inner_dim)
        self._limit = limit

    def __call__(self, x: Tensor) -> Tensor:
        return linear(swiglu(linear(x, self._gate_up), self._limit), self._down)

    def add_to(self, stage: Stage, normed: Values, hidden: Values) -> None:
        """`hidden` += the block of `normed`, as ops of a compiled stage."""
        assert not self._limit, "limits of dense blocks are not compiled"
        inner = stage.gate(stage.linear(normed, pack(packable(self._gate_up))))
        stage.add(stage.linear(inner, pack(packable(self._down))), hidden)


class Routing(NamedTuple):
    """Which experts each token goes to, ascending [tokens, per_token], and with what weight."""

    experts: Tensor
    weights: Tensor


class Inner(NamedTuple):
    """Between the two products: a line per token and expert, sorted by expert; where each begins
    and the last one ends; and room for what the experts make of them."""

    values: Tensor
    order: Tensor
    edges: Tensor
    outer: Tensor


class Moe:
    """With `expert_ranks` the experts are divided: this rank has some, and the tokens travel."""

    def __init__(
        self,
        config: ModelConfig,
        source: Source,
        *,
        number: int = 0,
        expert_ranks: ExpertRanks | None = None,
    ) -> None:
        c = config
        self._config = c
        self._number = number
        self._expert_ranks = expert_ranks
        self._own = range(c.expert_count) if expert_ranks is None else expert_ranks.own(number)
        self._gate = source.matrix("gate", c.expert_count, c.hidden_dim).float()
        self._correction = None
        if c.expert_scores == "sigmoid":
            self._correction = source.vector("gate.e_score_correction_bias", c.expert_count)
        self._gate_up, self._down = _stack_experts(c, source.under("experts"), self._own)
        self._shared = None
        if c.shared_expert_count:
            self._shared = Mlp(
                source.under("shared_experts"),
                hidden_dim=c.hidden_dim,
                inner_dim=c.shared_width,
                limit=c.shared_limit,
            )

    def __call__(self, x: Tensor, part: Part = "batch") -> Tensor:
        routed = self.routed(x, self.route(x), part)
        return routed if self._shared is None else routed + self.shared(x)

    def add_to(self, stage: Stage, normed: Values, hidden: Values) -> None:
        """`hidden` += the block of `normed`, as ops of a compiled stage."""
        c = self._config
        assert not self.is_divided, "a stage has all experts"
        assert self._correction is not None, "softmax scores are not compiled"
        routing = compiled.Routing(
            per_token=c.experts_per_token,
            group_count=c.expert_group_count,
            groups_kept=c.expert_groups_kept,
            is_normed=c.expert_weights_normed,
            scale=c.expert_scale,
            correction=self._correction,
        )
        logits = stage.linear(normed, pack(self._gate))
        stage.experts(normed, logits, routing, pack(self._gate_up[0]), pack(self._down[0]), hidden)
        if self._shared is not None:
            self._shared.add_to(stage, normed, hidden)

    def route(self, x: Tensor) -> Routing:
        """The correction bias steers the choice of experts; their weights do without it."""
        c, logits = self._config, F.linear(x.float(), self._gate)
        scores = logits.softmax(-1) if c.expert_scores == "softmax" else logits.sigmoid()
        choice = scores if self._correction is None else scores + self._correction
        if c.expert_group_count > 1:
            choice = self._limit_groups(choice)
        experts = _best(choice, c.experts_per_token)
        weights = scores.gather(1, experts)
        if c.expert_weights_normed:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, weights * c.expert_scale)

    def _limit_groups(self, choice: Tensor) -> Tensor:
        """Groups are ranked by the sum of their two best experts; the scores of experts in other
        groups become 0 or -inf."""
        count = self._config.expert_group_count
        groups = choice.view(len(choice), count, choice.shape[1] // count)
        strength = groups.topk(GROUP_BEST, -1).values.sum(-1)
        kept = torch.zeros_like(strength, dtype=torch.bool)
        kept.scatter_(1, _best(strength, self._config.expert_groups_kept), True)
        left = 0.0 if self._config.expert_groups_zeroed else -torch.inf
        return groups.masked_fill(~kept[..., None], left).flatten(1)

    def routed(self, x: Tensor, routing: Routing, part: Part = "batch") -> Tensor:
        """Tokens sorted by expert run as two grouped products; each token sums its own, in order.

        Sorting is stable and the sum runs over ascending experts in float32, so a token's result
        does not depend on which other tokens chose the same experts, beyond the products' rounding.
        """
        if self._expert_ranks is not None:
            return self._through_exchange(self._expert_ranks, x, routing, part)
        if x.is_cpu:
            limit = self._config.expert_limit
            return routed.experts(_products, x, *routing, self._gate_up, self._down, limit)
        inner = self.up(x, routing)
        self.down(inner, range(self.own_count))
        return self.collect(inner, routing)

    def _through_exchange(
        self, expert_ranks: ExpertRanks, x: Tensor, routing: Routing, part: Part
    ) -> Tensor:
        """Cut by cut, so that what comes from all ranks at a time stays small."""
        made, cuts = [], expert_ranks.cuts(len(x), part)
        for cut in cuts:
            tokens = slice(cut.start, None if cut is cuts[-1] else cut.stop)
            chosen = Routing(routing.experts[tokens], routing.weights[tokens])
            made.append(self._exchanged(expert_ranks, x[tokens], chosen, cut))
        return made[0] if len(made) == 1 else torch.cat(made)

    def _exchanged(
        self, expert_ranks: ExpertRanks, x: Tensor, routing: Routing, cut: range
    ) -> Tensor:
        """All that came for this cut is dropped here, before the next cut has its own."""
        whole = range(self.own_count)
        exchange = self._departed(expert_ranks, x, routing, cut)
        exchange.send()
        inner = self.up(x, routing, exchange.arrive())
        self.down(inner, whole)
        self.give_back(inner, whole, exchange)
        return self.collect(inner, routing, exchange)

    @property
    def is_divided(self) -> bool:
        return self._expert_ranks is not None

    @property
    def own_count(self) -> int:
        """The number of experts on this rank."""
        return len(self._own)

    @property
    def has_shared(self) -> bool:
        return self._shared is not None

    def depart(
        self, x: Tensor, routing: Routing, part: Part, lengths: Tensor | None = None
    ) -> ExpertExchange | None:
        """Begins what `up` waits for; None where all experts are here. Tokens whose `lengths` are 0
        are pads."""
        if self._expert_ranks is None:
            return None
        [whole] = self._expert_ranks.cuts(len(x), part)
        return self._departed(self._expert_ranks, x, routing, whole, lengths)

    def _departed(
        self,
        expert_ranks: ExpertRanks,
        x: Tensor,
        routing: Routing,
        cut: range,
        lengths: Tensor | None = None,
    ) -> ExpertExchange:
        kept = x.to(routed.product_type(self._gate_up[0]))
        return expert_ranks.depart(kept, *routing, layer=self._number, cut=cut, lengths=lengths)

    def up(self, x: Tensor, routing: Routing, received: Received | None = None) -> Inner:
        chosen = routing.experts if received is None else received.places
        order, ends = routed.by_expert(chosen, self.own_count)
        values = self._inner(x, order, ends, received)
        edges, outer = F.pad(ends, (1, 0)), values.new_empty(len(values), self._config.hidden_dim)
        return Inner(values, order, edges, outer)

    def _inner(self, x: Tensor, order: Tensor, ends: Tensor, received: Received | None) -> Tensor:
        """By expert: the first product, gated."""
        weights, scales = self._gate_up
        if received is None:
            each = self._config.experts_per_token
            tokens = x.to(routed.product_type(weights))[order // each]
        else:
            tokens = taken(received.tokens, received.lines[order], ends)
        both, limit = _products(tokens, ends, weights, scales=scales), self._config.expert_limit
        if both.is_cpu and received is None:
            return swiglu(both.float(), limit).to(both.dtype)
        del tokens
        return gated(both, ends, limit)

    def down(self, inner: Inner, experts: range) -> None:
        """These experts' lines of `inner.outer`, one per token that chose them."""
        edges = inner.edges[experts.start : experts.stop + 1]
        held = slice(experts.start, experts.stop)
        weights, scales = self._down[0][held], None
        if self._down[1] is not None:
            scales = self._down[1][held]
        if inner.values.is_cpu:
            first, stop = int(edges[0]), int(edges[-1])
            lines = _products(inner.values[first:stop], edges[1:] - first, weights, scales=scales)
            inner.outer[first:stop] = lines
            return
        begin = edges[:1] if experts.start else None
        ops("cuda").expert_products(
            inner.values, edges[1:], weights, scales=scales, begin=begin, out=inner.outer
        )

    def give_back(self, inner: Inner, experts: range, exchange: ExpertExchange | None) -> None:
        """What these experts have made goes to the ranks of its tokens."""
        if exchange is not None:
            exchange.give_back(inner.outer, inner.order, inner.edges, experts)

    def collect(
        self, inner: Inner, routing: Routing, exchange: ExpertExchange | None = None
    ) -> Tensor:
        """Each token's weighted sum, float32, of what all its experts made for it."""
        if exchange is not None:
            return exchange.collect(inner.outer.dtype, self._config.hidden_dim)
        if inner.outer.is_cpu:
            return routed.collected(inner.outer, inner.order, routing.weights)
        places = routed.places_in(inner.order).view(routing.weights.shape)
        return added(inner.outer, places, routing.weights, torch.float32)

    def shared(self, x: Tensor) -> Tensor:
        assert self._shared is not None, "this model has no shared experts"
        return self._shared(x)


def _products(tokens: Tensor, ends: Tensor, weights: Tensor, *, scales: Tensor | None) -> Tensor:
    """Multiplies by torch on a CPU, on a device by the op, which does not wait for `ends`."""
    if tokens.is_cpu and scales is None:
        return F.grouped_mm(tokens, weights.transpose(1, 2), offs=ends)
    if tokens.is_cpu:
        return ops("cpu").expert_products(tokens, ends, weights, scales=scales)
    out = tokens.new_empty(len(tokens), weights.shape[1])
    return ops("cuda").expert_products(tokens, ends, weights, scales=scales, out=out)


def _best(scores: Tensor, count: int) -> Tensor:
    lengths = torch.full((scores.shape[0],), scores.shape[1], device=scores.device)
    return top_k(scores, lengths, count).long()


def _gate_up(source: Source, hidden_dim: int, inner_dim: int) -> Weight:
    names = "gate_proj", "up_proj"
    return stacked([source.weight(name, inner_dim, hidden_dim) for name in names])


def _stack_experts(
    config: ModelConfig, source: Source, own: Sequence[int]
) -> tuple[Weights, Weights]:
    """[experts, 2 * inner, hidden] and [experts, hidden, inner] of a rank's own experts, filled one
    expert at a time; their scales, where the weights are kept in blocks."""
    inner, hidden = config.expert_dim, config.hidden_dim
    if config.experts_stacked:
        assert len(own) == config.expert_count, "stacked experts are not divided"
        up = source.take("gate_up_proj", config.expert_count, 2 * inner, hidden)
        down = source.take("down_proj", config.expert_count, hidden, inner)
        return (plain(up), None), (plain(down), None)
    stacks: tuple[Weights, Weights] | None = None
    for place, number in enumerate(own):
        expert = source.under(str(number))
        weights = _gate_up(expert, hidden, inner), expert.weight("down_proj", hidden, inner)
        if stacks is None:
            stacks = _room(len(own), weights[0]), _room(len(own), weights[1])
        for stack, weight in zip(stacks, weights, strict=True):
            _fill(stack, place, weight)
    assert stacks is not None, "a model without experts"
    return stacks


def _room(count: int, like: Weight) -> Weights:
    if isinstance(like, Fp8Weight):
        values, scales = like.values, like.scales
        return values.new_empty(count, *values.shape), scales.new_empty(count, *scales.shape)
    return plain(like).new_empty(count, *like.shape), None


def _fill(stack: Weights, place: int, weight: Weight) -> None:
    values, scales = stack
    if not isinstance(weight, Fp8Weight):
        values[place] = plain(weight)
        return
    assert scales is not None, f"the expert at {place} is in blocks, and the first is not"
    values[place], scales[place] = weight.values, weight.scales
