"""The stage facade: a decoder layer as pure calls over explicit tensors, nothing hidden.

    entry  = layer.enter(hidden)               norm and down-projections
    probe  = layer.index(entry, rotation)      indexer queries, weights and new keys (full layers)
    asked  = layer.pre_attn(entry, rotation)   absorbed queries and the new rows
    ...    attend: the caller's; float32 [tokens, heads, latent] comes back
    hidden = layer.output(hidden, attended)
    hidden = layer.mlp(hidden)

No module keeps rows, keys or positions: the caller puts pools, fetches and merges between the
calls. `index` needs nothing from `pre_attn`, so a fetch can start before the queries are made.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ess.models.config import ModelConfig
from ess.models.indexer import Indexer, Probe
from ess.models.layers import Rotation, Source, rms_norm
from ess.models.mla import Mla
from ess.models.moe import Mlp, Moe


class Entry(NamedTuple):
    """A layer's normed input and what it is projected down to."""

    hidden: Tensor
    query: Tensor
    row: Tensor


class Asked(NamedTuple):
    """Absorbed queries [tokens, heads, latent + rope] and new rows [tokens, latent + rope]."""

    queries: Tensor
    rows: Tensor


class DecoderLayer:
    def __init__(self, config: ModelConfig, source: Source, number: int) -> None:
        attention = source.under("self_attn")
        self.number = number
        self.mla = Mla(config, attention)
        self.indexer = (
            Indexer(config, attention.under("indexer")) if config.has_indexer(number) else None
        )
        self.experts = Moe(config, source.under("mlp")) if config.has_experts(number) else None
        self.dense = (
            None
            if self.experts
            else Mlp(source.under("mlp"), hidden_dim=config.hidden_dim, inner_dim=config.dense_dim)
        )
        self._eps = config.norm_eps
        self._input_norm = source.vector("input_layernorm.weight", config.hidden_dim)
        self._mlp_norm = source.vector("post_attention_layernorm.weight", config.hidden_dim)

    def enter(self, hidden: Tensor) -> Entry:
        normed = rms_norm(hidden, self._input_norm, self._eps)
        return Entry(normed, *self.mla.down(normed))

    def index(self, entry: Entry, rotation: Rotation) -> Probe:
        assert self.indexer is not None, f"layer {self.number} shares another layer's selection"
        return self.indexer.probe(entry.hidden, entry.query, rotation)

    def pre_attn(self, entry: Entry, rotation: Rotation) -> Asked:
        return Asked(self.mla.queries(entry.query, rotation), self.mla.rows(entry.row, rotation))

    def output(self, hidden: Tensor, attended: Tensor) -> Tensor:
        return hidden + self.mla.output(attended)

    def mlp_input(self, hidden: Tensor) -> Tensor:
        """What the experts see: for callers that route and dispatch themselves."""
        return rms_norm(hidden, self._mlp_norm, self._eps)

    def mlp(self, hidden: Tensor) -> Tensor:
        block = self.experts or self.dense
        assert block is not None
        return hidden + block(self.mlp_input(hidden))
