"""The multi-token-prediction module: one decoder layer that guesses the token after next.

Its row p pairs the main model's finished hidden state of position p with the embedding of token
p + 1, at rope position p. For further drafts its own finished state takes the main model's place.
Embedding and head are the main model's; stored copies of them are not read.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ess.comm.experts.expert_ranks import ExpertRanks
from ess.kernels.cpu.stage import Stage, pack
from ess.models.config import ModelConfig
from ess.models.decoder import DecoderLayer
from ess.models.layers import Source, linear, rms_norm
from ess.models.weights.kept import plain


class Mtp:
    def __init__(
        self,
        config: ModelConfig,
        source: Source,
        *,
        first: int,
        tp: int,
        expert_ranks: ExpertRanks | None,
    ) -> None:
        number, dim = config.layer_count, config.hidden_dim
        own = source.under(f"model.layers.{number}")
        self.layer = DecoderLayer(
            config, own, number, first=first, tp=tp, expert_ranks=expert_ranks
        )
        self._eps = config.norm_eps
        self._embedding_norm = own.vector("enorm.weight", dim)
        self._hidden_norm = own.vector("hnorm.weight", dim)
        self._join = own.weight("eh_proj", dim, 2 * dim)
        self.norm = own.vector("shared_head.norm.weight", dim)

    def join(self, embedded: Tensor, finished: Tensor) -> Tensor:
        """Next tokens' embeddings and this position's finished state -> the layer's input."""
        parts = (
            rms_norm(embedded, self._embedding_norm, self._eps),
            rms_norm(finished, self._hidden_norm, self._eps),
        )
        return linear(torch.cat(parts, -1), self._join)

    @functools.cached_property
    def join_stage(self) -> Stage:
        """`join` for a few tokens, compiled."""
        stage, dim = Stage(), self.norm.shape[0]
        sides, both = (stage.take(dim), stage.take(dim)), stage.room(2 * dim)
        for place, norm in enumerate((self._embedding_norm, self._hidden_norm)):
            stage.norm(sides[place], norm, self._eps, both.part(place * dim, dim))
        stage.give(stage.linear(both, pack(plain(self._join))), torch.float32)
        return stage

    def finish(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.norm, self._eps)
