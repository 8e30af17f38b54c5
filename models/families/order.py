"""Reorders the weights of models whose checkpoints have another order of rotary dimensions.

Here rotary embedding rotates neighbouring pairs of queries and rows, and the first dimensions of an
index key. Where a model rotates the first half against the second, or the end of a key, its weights
are reordered when they are read. Each product, norm and score stays what it was, because queries
and keys get the same order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ess.models.config import ModelConfig
from ess.models.layers import TensorSource
from ess.models.weights.kept import Weight, plain


def in_our_order(config: ModelConfig, tensor: TensorSource) -> TensorSource:
    """For rotary parts that turn half against half, and index keys whose last dimensions turn."""
    index_keys = _keys(config, 1)
    orders = {
        "q_b_proj": _queries(config),
        "kv_a_proj_with_mqa": _row(config),
        "wq_b": _keys(config, config.index_head_count),
        "wk": index_keys,
        "k_norm": index_keys,
    }

    def ordered(name: str) -> Weight:
        order = orders.get(f".{name}".split(".")[-2])
        return tensor(name) if order is None else plain(tensor(name))[order]

    return ordered


def _queries(config: ModelConfig) -> Tensor:
    """The order of queries in every head: dimensions that are not turned, then the pairs."""
    head = torch.cat((torch.arange(config.nope_dim), config.nope_dim + _pairs(config.rope_dim)))
    return _repeated(head, config.head_count)


def _row(config: ModelConfig) -> Tensor:
    latent = config.latent_dim
    return torch.cat((torch.arange(latent), latent + _pairs(config.rope_dim)))


def _keys(config: ModelConfig, count: int) -> Tensor:
    """The dimensions that turn come first, still half against half."""
    return _repeated(torch.arange(config.index_dim).roll(config.rope_dim), count)


def _pairs(dim: int) -> Tensor:
    """The first of one half, the first of the other, the second ..."""
    return torch.arange(dim).view(2, -1).T.flatten()


def _repeated(order: Tensor, count: int) -> Tensor:
    return (torch.arange(count)[:, None] * len(order) + order).flatten()
