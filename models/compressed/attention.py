"""Attention to rows that are keys and values at once, each head with a sink.

A row is the key of all heads at once; what a head attends to is the weighted sum of whole rows.
Rows are rotated by their positions, so this sum is rotated back by the query's position: what is
left depends only on the distance between the two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ess.models.compressed.streams import normed
from ess.models.config import ModelConfig
from ess.models.layers import Rotation, Source, linear, rms_norm, rotate_part


class Attention:
    def __init__(self, config: ModelConfig, source: Source) -> None:
        c, own, dim = config, config.compressed, config.value_dim
        assert own is not None, "attention of another family"
        self._config, self._groups = c, own.output_groups
        middle = own.output_groups * own.output_rank
        self._query_down = source.weight("wq_a", c.query_rank, c.hidden_dim)
        self._query_norm = source.vector("q_norm.weight", c.query_rank)
        self._query_up = source.weight("wq_b", c.head_count * dim, c.query_rank)
        self._row = source.weight("wkv", dim, c.hidden_dim)
        self._row_norm = source.vector("kv_norm.weight", dim)
        per_group = c.head_count * dim // own.output_groups
        self._group_out = source.matrix("wo_a", middle, per_group)
        self._out = source.weight("wo_b", c.hidden_dim, middle)
        self.sinks = source.vector("attn_sink", c.head_count)
        self.scale = dim**-0.5

    def query(self, hidden: Tensor) -> Tensor:
        """The normed low-rank query, of a layer's normed input: an indexer reads it too."""
        down = linear(hidden, self._query_down)
        return rms_norm(down, self._query_norm, self._config.norm_eps)

    def queries(self, query: Tensor, rotation: Rotation) -> Tensor:
        """[tokens, heads, dim]"""
        c = self._config
        heads = linear(query, self._query_up).view(-1, c.head_count, c.value_dim)
        return turn(c, normed(heads, c.norm_eps), rotation)

    def rows(self, hidden: Tensor, rotation: Rotation) -> Tensor:
        """[tokens, dim]: what attention reads of each of the last tokens."""
        rows = rms_norm(linear(hidden, self._row), self._row_norm, self._config.norm_eps)
        return turn(self._config, rows, rotation)

    def output(self, attended: Tensor, rotation: Rotation) -> Tensor:
        """Attended rows, float32 [tokens, heads, dim] -> [tokens, hidden]. Groups of heads have a
        product each; a last one joins them."""
        back = Rotation(rotation.cos, -rotation.sin, rotation.positions)
        turned = turn(self._config, attended, back)
        grouped = turned.reshape(len(attended), self._groups, -1).transpose(0, 1)
        weights = self._group_out.view(self._groups, -1, grouped.shape[-1])
        grouped_out = torch.bmm(grouped.to(weights.dtype), weights.transpose(1, 2))
        return linear(grouped_out.transpose(0, 1).flatten(1), self._out)


def turn(config: ModelConfig, x: Tensor, rotation: Rotation) -> Tensor:
    """The last dimensions of x, as pairs that lie side by side."""
    at = x.shape[-1] - config.rope_dim
    return rotate_part(x, rotation, "interleaved", at=at, dim=config.rope_dim)


def attend(queries: Tensor, rows: Tensor, seen: Tensor, *, scale: float, sinks: Tensor) -> Tensor:
    """Plain float32 attention of each query [n, heads, dim] over the rows [count, dim] that it may
    see, bool [n, count]. A sink takes its share of the weights and gives nothing."""
    scores = (queries.float() @ rows.T) * scale
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    column = sinks[:, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ rows
