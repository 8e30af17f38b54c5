"""The stages called by hand, in the order in which an engine that fetches would call them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ess.models.indexer import index_scores, top_k
from ess.models.mla import attend
from ess.models.model import Model


@dataclass(frozen=True)
class Walk:
    hidden: torch.Tensor
    scores: list[torch.Tensor]
    selections: list[torch.Tensor]

    def margin(self, top_k: int) -> float:
        """The smallest distance between the last score that is in and the first that is out."""
        gaps = []
        for scores in self.scores:
            for position in range(top_k, len(scores)):
                best = scores[position, : position + 1].topk(top_k + 1).values
                gaps.append(float(best[-2] - best[-1]))
        return min(gaps)


@torch.inference_mode()
def walk(model: Model, tokens: list[int]) -> Walk:
    c = model.config
    positions = torch.arange(len(tokens))
    rotation = model.rotation(positions)
    hidden = model.embed(torch.tensor(tokens))
    all_scores, selections = [], []
    for layer in model.layers:
        entry = layer.enter(hidden)
        if layer.indexer is not None:
            probe = layer.index(entry, rotation)
            all_scores.append(index_scores(probe.queries, probe.weights, probe.keys))
            selections.append(top_k(all_scores[-1], positions + 1, c.top_k))
        queries, rows = layer.pre_attn(entry, rotation)
        attended = attend(
            queries, rows, selections[-1], latent_dim=c.latent_dim, scale=c.attention_scale
        )
        hidden = layer.mlp(layer.output(hidden, attended))
    return Walk(model.finish(hidden), all_scores, selections)
