"""The lightning indexer: cheap scores of every cached token, from which the top-k are kept.

score(t, s) = sum over heads j of w[t, j] * relu(q[t, j] . k[s]), with k a layer-normed key, one per
token, roped on its first `rope_dim` values; the factors heads^-0.5 and dim^-0.5 are folded into w.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ess.kernels.calls import KeyFinish
from ess.kernels.cpu.stage import Heads, Stage, Values, pack
from ess.layout import IndexCodec
from ess.models.config import ModelConfig
from ess.models.layers import Rotation, Source, linear, rotate_part
from ess.models.weights.kept import plain

SCORE_ELEMENTS: Final = 1 << 20
END: Final = 1 << 40  # behind all positions


class Probe(NamedTuple):
    """What the index stage hands on: queries [tokens, heads, dim], float32 weights, new keys."""

    queries: Tensor
    weights: Tensor
    keys: Tensor


class Indexer:
    def __init__(self, config: ModelConfig, source: Source) -> None:
        c = config
        self._config = c
        self._scale = c.index_head_count**-0.5 * c.index_dim**-0.5
        self._query_up = source.weight("wq_b", c.index_head_count * c.index_dim, c.query_rank)
        self._key = source.weight("wk", c.index_dim, c.hidden_dim)
        self._key_weight = source.vector("k_norm.weight", c.index_dim)
        self._key_bias = source.vector("k_norm.bias", c.index_dim)
        self._head = source.matrix("weights_proj", c.index_head_count, c.hidden_dim).float()

    def probe(self, hidden: Tensor, query: Tensor, rotation: Rotation) -> Probe:
        """From the normed hidden state and the normed low-rank query of the new tokens."""
        queries, weights, keys = self.raw(hidden, query, rotation)
        normed = F.layer_norm(
            keys, (keys.shape[-1],), self._key_weight, self._key_bias, self._config.index_norm_eps
        )
        return Probe(self._turn(queries, rotation), weights, self._turn(normed, rotation))

    def raw(self, hidden: Tensor, query: Tensor, rotation: Rotation) -> Probe:
        """The same, but that queries and keys are still to be turned, and keys to be normed."""
        parts = self.queries(query, rotation), self.weights(hidden), linear(hidden, self._key)
        return Probe(*parts)

    def queries(self, query: Tensor, rotation: Rotation) -> Tensor:
        """Still to be turned. What a family puts behind the low-rank query is not read."""
        c = self._config
        return linear(query[:, : c.query_rank], self._query_up).view(
            -1, c.index_head_count, c.index_dim
        )

    def weights(self, hidden: Tensor) -> Tensor:
        weights: Tensor = F.linear(hidden.float(), self._head) * self._scale
        return weights

    def key_finish(self, rotation: Rotation) -> KeyFinish | None:
        """What keys still need, for an op that does it; None where no op does it."""
        eps = self._config.index_norm_eps
        return KeyFinish(self._key_weight, self._key_bias, eps, rotation.angles)

    def probe_in(self, stage: Stage, normed: Values, query: Values, codec: IndexCodec) -> None:
        """The same as ops of a compiled stage; gives queries, weights and encoded keys."""
        c, is_fp8 = self._config, codec.form == "fp8"
        queries = stage.linear(query, pack(plain(self._query_up)))
        keys = stage.linear(normed, pack(plain(self._key)))
        stage.center(keys, self._key_weight, self._key_bias, c.index_norm_eps)
        for values, count in ((queries, c.index_head_count), (keys, 1)):
            stage.rotate(Heads(values.part(0, c.rope_dim), count, c.index_dim), c.index_rope_style)
            if is_fp8 and codec.hadamard:
                stage.hadamard(Heads(values.part(0, c.index_dim), count, c.index_dim))
        form = torch.bfloat16 if is_fp8 else torch.float32
        stage.give(queries, form, c.index_head_count, c.index_dim)
        stage.give(stage.linear(normed, pack(self._head), factor=self._scale), torch.float32)
        stage.give_key(keys, codec)

    def _turn(self, x: Tensor, rotation: Rotation) -> Tensor:
        style = self._config.index_rope_style
        return rotate_part(x, rotation, style, at=0, dim=self._config.rope_dim)


def select(probe: Probe, keys: Tensor, lengths: Tensor, k: int) -> Tensor:
    """The selection of each query among the first `lengths` keys, some queries at a time."""
    step = max(1, SCORE_ELEMENTS // keys.shape[0])
    parts = [
        top_k(index_scores(q, w, keys), n, k)
        for q, w, n in zip(
            torch.split(probe.queries, step),
            torch.split(probe.weights, step),
            torch.split(lengths, step),
            strict=True,
        )
    ]
    return torch.cat(parts)


def select_units(probe: Probe, keys: Tensor, lengths: Tensor, k: int, unit: int) -> Tensor:
    """`select` of units, each of `unit` neighbouring keys (`pooled`): int32 [tokens, k]."""
    chosen = select(probe, pooled(keys, unit), lengths // unit, k // unit)
    return rows_of_units(chosen, lengths, k, unit)


def pooled(keys: Tensor, unit: int) -> Tensor:
    """One key [n // unit, dim] of each whole unit of keys [n, 2 * dim]: a mean, dimension by
    dimension, weighed by the softmax of the second half of each."""
    whole = keys[: len(keys) // unit * unit].float().view(-1, unit, keys.shape[1])
    values, weights = whole.chunk(2, -1)
    return (weights.softmax(1) * values).sum(1)


def rows_of_units(units: Tensor, lengths: Tensor, k: int, unit: int) -> Tensor:
    """Positions, ascending, of the rows of chosen units [tokens, k // unit], and of those behind
    the last whole unit of the first `lengths` rows; then -1."""
    within = torch.arange(unit, device=units.device)
    chosen = (units[..., None] * unit + within).masked_fill(units[..., None] < 0, END).flatten(1)
    tail = (lengths // unit * unit)[:, None] + within[: unit - 1]
    tail = tail.masked_fill(tail >= lengths[:, None], END)
    rows = torch.cat((chosen, tail), 1).sort(1).values
    assert rows.shape[1] == k, f"{rows.shape[1]} rows of units, {k} are a selection"
    return rows.masked_fill(rows == END, -1).int()


def last_positions(lengths: Tensor, count: int, width: int) -> Tensor:
    """The last `count` of the first `lengths` positions, as `top_k` says what it selects."""
    places = torch.arange(width, device=lengths.device)
    chosen = (lengths - count).clamp_min(0)[:, None] + places
    return chosen.where((places < count) & (chosen < lengths[:, None]), -1).int()


def index_scores(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """float32 [tokens, keys]; tiled over queries so that the per-head products stay small."""
    step = max(1, SCORE_ELEMENTS // (queries.shape[1] * keys.shape[0]))
    flat = keys.float().T
    parts = [
        torch.bmm(w[:, None], (q.float() @ flat).relu_()).squeeze(1)
        for q, w in zip(torch.split(queries, step), torch.split(weights, step), strict=True)
    ]
    return torch.cat(parts)


def top_k(scores: Tensor, lengths: Tensor, k: int) -> Tensor:
    """The k best of the first `lengths` scores: int32 [rows, k], ascending, padded with -1.

    Everything above the k-th best score is in; among the scores equal to it, the lowest positions
    fill what is left. So the result does not depend on how a sort treats ties. NaN counts as
    infinite, so that it is seen. Nothing here waits for a device: what is not chosen goes to a
    column that is cut off.
    """
    seen = torch.arange(scores.shape[1], device=scores.device) < lengths[:, None]
    visible = scores.masked_fill(scores.isnan(), torch.inf).masked_fill(~seen, -torch.inf)
    width = min(k, scores.shape[1])
    floor = visible.topk(width, sorted=True).values[:, -1:]
    above = visible > floor
    level = (visible == floor) & seen
    room = width - above.sum(1, keepdim=True)
    chosen = above | (level & (level.cumsum(1) <= room))
    picked = torch.full((scores.shape[0], k + 1), -1, dtype=torch.int32, device=scores.device)
    rank = (chosen.cumsum(1) - 1).where(chosen, k)
    position = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    return picked.scatter_(1, rank, position.expand_as(rank))[:, :k]
