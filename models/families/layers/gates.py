"""Sigmoid gates of attention's values, and behind norms (A.X-K2, Hy4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ess.models.config import ModelConfig
from ess.models.decoder import DecoderLayer
from ess.models.layers import Norm, Rotation, Source, linear, rms_norm
from ess.models.mla import Mla


class GatedNorm(Norm):
    """y = norm(x), times the sigmoid of two small products of y."""

    def __init__(self, config: ModelConfig, source: Source) -> None:
        super().__init__(source.under("norm"), config.hidden_dim, config.norm_eps)
        dim, rank = config.hidden_dim, config.norm_gate_rank
        self._down = source.matrix("W_down", rank, dim)
        self._up = source.matrix("W_up", dim, rank)

    def __call__(self, x: Tensor) -> Tensor:
        normed = super().__call__(x)
        return normed * linear(F.silu(linear(normed, self._down)), self._up).sigmoid()


class InputGatedMla(Mla):
    """Gates of values are made of the layer's input; each head has a sink."""

    def __init__(self, config: ModelConfig, source: Source) -> None:
        super().__init__(config, source)
        c, values = config, config.head_count * config.value_dim
        self._gates = source.weight("linear_gate", values, c.hidden_dim)
        self.sinks = source.vector("learnable_sink_param", c.head_count)

    def gated_output(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """`hidden` is the layer's normed input, as `down` gets it."""
        gates = linear(hidden, self._gates).sigmoid()
        return linear(self.values(attended).flatten(1) * gates, self._out)


class HeadGatedMla(Mla):
    """A gate for each head, made of the layer's input. Normed latents are scaled, the shared rotary
    key is normed."""

    def __init__(self, config: ModelConfig, source: Source) -> None:
        super().__init__(config, source)
        c = config
        growth = (c.hidden_dim / c.query_rank) ** 0.5 * c.query_factor
        self._query_norm = self._query_norm * growth
        self._latent_norm = self._latent_norm * (c.hidden_dim / c.latent_dim) ** 0.5
        self._rope_norm = source.vector("k_rope_only_layernorm.weight", c.rope_dim)
        self._gates = source.weight("g_proj", c.head_count, c.hidden_dim)

    def rows(self, row: Tensor, rotation: Rotation) -> Tensor:
        latent, rope = torch.split(row, [self._config.latent_dim, self._config.rope_dim], -1)
        normed = rms_norm(rope, self._rope_norm, self._config.norm_eps)
        return super().rows(torch.cat((latent, normed), -1), rotation)

    def row_finish(self, rotation: Rotation) -> None:
        """None: no op norms the rotary key."""
        return

    def gated_output(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """`hidden` is the layer's normed input, as `down` gets it."""
        gates = linear(hidden, self._gates).sigmoid()[..., None]
        return linear((self.values(attended) * gates).flatten(1), self._out)


class QueryGatedMla(Mla):
    """The up-projection makes of each head a query and then gates of its values. It reads the
    normed low-rank query with the raw one behind it, and that is what `down` hands on."""

    def _queries_from(self, source: Source) -> Tensor:
        c = self._config
        each, rank = c.nope_dim + c.rope_dim, 2 * c.query_rank
        both = source.matrix("q_b_proj", self.head_count * (each + c.value_dim), rank)
        per_head = both.view(self.head_count, -1, rank)
        queries, gates = torch.split(per_head, [each, c.value_dim], 1)
        self._gate_up = gates.flatten(0, 1)
        return queries.flatten(0, 1)

    def down(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        c = self._config
        raw, row = torch.split(linear(hidden, self._down), [c.query_rank, c.row_dim], -1)
        normed = rms_norm(raw, self._query_norm, c.query_latent_eps)
        return torch.cat((normed, raw), -1), row

    def gated_output(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """`hidden` is the layer's normed input, as `down` gets it."""
        query, _ = self.down(hidden)
        gates = linear(query, self._gate_up).sigmoid()
        return linear(self.values(attended).flatten(1) * gates, self._out)


class GatedLayer(DecoderLayer):
    mla: QueryGatedMla
    has_stages = False

    def _attention(self, config: ModelConfig, source: Source, tp: int) -> QueryGatedMla:
        return QueryGatedMla(config, source)

    def _norm(self, config: ModelConfig, source: Source) -> Norm:
        return GatedNorm(config, source)

    def _norm_for_mlp(self, config: ModelConfig, source: Source) -> Norm:
        """Gated before experts alone."""
        kind = GatedNorm if self.experts else super()._norm_for_mlp
        return kind(config, source)

    def output(self, hidden: Tensor, attended: Tensor) -> Tensor:
        return hidden + self.mla.gated_output(self._input_norm(hidden), attended)
