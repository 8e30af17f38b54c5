"""Experts by the square root of a softplus; in the first layers a table says which.

Weights of both are a token's scores of the chosen experts, divided by their sum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ess.errors import BadInput
from ess.models.config import ModelConfig
from ess.models.indexer import top_k
from ess.models.layers import Source
from ess.models.moe import Moe, Routing


class Experts(Moe):
    def __init__(self, config: ModelConfig, source: Source, number: int) -> None:
        """The experts of layer `number`."""
        super().__init__(config, source)
        assert config.compressed is not None, "experts of another family"
        self._table = None
        if config.compressed.hashed[number]:
            per_token = config.experts_per_token
            self._table = source.table("gate.tid2eid", config.vocab_size, per_token)
            _check(self._table, config.expert_count)
        else:
            self._correction = source.vector("gate.e_score_correction_bias", config.expert_count)

    def run(self, x: Tensor, tokens: Tensor) -> Tensor:
        """`tokens` are their ids."""
        routed = self.routed(x, self.route_tokens(x, tokens))
        return routed + self.shared(x) if self.has_shared else routed

    def route_tokens(self, x: Tensor, tokens: Tensor) -> Routing:
        c = self._config
        scores = F.softplus(F.linear(x.float(), self._gate)).sqrt()
        if self._table is not None:
            experts = self._table[tokens].sort(-1).values
        else:
            assert self._correction is not None, "a layer with neither a table nor a correction"
            lengths = torch.full((len(x),), c.expert_count)
            experts = top_k(scores + self._correction, lengths, c.experts_per_token).long()
        weights = scores.gather(1, experts)
        return Routing(experts, weights / (weights.sum(-1, keepdim=True) + 1e-20) * c.expert_scale)


def _check(table: Tensor, expert_count: int) -> None:
    low, high = int(table.min()), int(table.max())
    if not 0 <= low <= high < expert_count:
        raise BadInput(f"gate.tid2eid has experts {low}..{high}, of {expert_count}")
