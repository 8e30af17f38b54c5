"""Queries of a layer's input that grow with the logarithm of their position (Mistral-Large-4)."""

from __future__ import annotations

from typing import Unpack

import torch.nn.functional as F
from torch import Tensor

from ess.kernels.calls import RowFinish
from ess.models.config import INDEX_NORM_EPS, ModelConfig
from ess.models.decoder import DecoderLayer
from ess.models.indexer import Indexer
from ess.models.layers import Rotation, Source, linear
from ess.models.mla import Mla
from ess.models.part import LayerPlace
from ess.models.weights.kept import Weight


class Growth:
    def __init__(self, source: Source, head_count: int) -> None:
        self._scale = source.vector("softmax_scaling.scale", head_count)
        self._bias = source.vector("softmax_scaling.bias", head_count)

    def __call__(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Queries [tokens, heads, dim]."""
        grown = (positions + 1).float().log()[:, None] * self._scale + self._bias
        return (queries * grown[..., None]).to(queries.dtype)


class GrownMla(Mla):
    """The low-rank query of other models is the normed input. Where the layer turns nothing, the
    rotary part of its rows and queries is zeros."""

    def __init__(self, config: ModelConfig, source: Source) -> None:
        super().__init__(config, source)
        self._growth = Growth(source, config.head_count)

    def _down_from(self, source: Source) -> Weight:
        return source.weight("kv_a_proj_with_mqa", self._config.row_dim, self._config.hidden_dim)

    def _queries_from(self, source: Source) -> Weight:
        c = self._config
        return source.weight("q_proj", c.head_count * (c.nope_dim + c.rope_dim), c.hidden_dim)

    def down(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden, linear(hidden, self._down)

    def queries(self, query: Tensor, rotation: Rotation) -> Tensor:
        asked = self._growth(super().queries(query, rotation), rotation.positions)
        return F.pad(asked, (0, self._config.filled_rope_dim))

    def rows(self, row: Tensor, rotation: Rotation) -> Tensor:
        return F.pad(super().rows(row, rotation), (0, self._config.filled_rope_dim))

    def row_finish(self, rotation: Rotation) -> RowFinish | None:
        return None if self._config.filled_rope_dim else super().row_finish(rotation)


class GrownIndexer(Indexer):
    def __init__(self, config: ModelConfig, source: Source) -> None:
        super().__init__(config, source)
        self._input_weight = source.vector("q_input_norm.weight", config.hidden_dim)
        self._input_bias = source.vector("q_input_norm.bias", config.hidden_dim)
        self._growth = Growth(source, config.index_head_count)

    def queries(self, query: Tensor, rotation: Rotation) -> Tensor:
        shape, made = query.shape[-1:], (self._input_weight, self._input_bias)
        normed = F.layer_norm(query, shape, *made, INDEX_NORM_EPS)
        return self._growth(super().queries(normed, rotation), rotation.positions)


class GrownLayer(DecoderLayer):
    has_stages = False

    def __init__(
        self, config: ModelConfig, source: Source, number: int, **place: Unpack[LayerPlace]
    ) -> None:
        super().__init__(config, source, number, **place)
        self._is_still = number in config.still_layers

    def _attention(self, config: ModelConfig, source: Source, tp: int) -> GrownMla:
        return GrownMla(config, source)

    def _indexer(self, config: ModelConfig, source: Source) -> GrownIndexer:
        return GrownIndexer(config, source)

    def turning(self, rotation: Rotation) -> Rotation:
        return rotation.still() if self._is_still else rotation
