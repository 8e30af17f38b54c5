"""Residual streams that are mixed around each block (manifold-constrained hyper-connections).

Hidden states are [tokens, streams, hidden]. A block reads one sum of the streams; what it makes is
added to each stream's share of a mixture of all. The mixture's rows and columns sum to 1 nearly, by
rounds of division, so that streams do not grow with depth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ess.models.config import ModelConfig
from ess.models.layers import Source


class Read(NamedTuple):
    """What a block gets, [tokens, hidden], and how what it makes goes back: each stream's share of
    it [tokens, streams], and what goes from stream j to stream k [tokens, j, k]."""

    sum: Tensor
    shares: Tensor
    mixture: Tensor


class Mixing:
    """Around one block."""

    def __init__(self, config: ModelConfig, source: Source, prefix: str) -> None:
        count = config.stream_count
        self._rounds = config.mixing_rounds
        self._config = config
        shares = (2 + count) * count
        self._product = source.values(f"{prefix}fn", shares, config.residual_dim)
        self._base = source.values(f"{prefix}base", shares)
        self._scale = source.values(f"{prefix}scale", 3)

    def read(self, streams: Tensor) -> Read:
        count, eps = self._config.stream_count, self._config.stream_eps
        parts = [count, count, count * count]
        projected = F.linear(normed(streams.flatten(1), self._config.norm_eps), self._product)
        values = zip(
            torch.split(projected, parts, -1),
            torch.split(self._base, parts),
            self._scale,
            strict=True,
        )
        taken, given, mixed = (value * scale + base for value, base, scale in values)
        weights = taken.sigmoid() + eps
        mixture = self._balanced(mixed.view(-1, count, count).softmax(-1) + eps)
        return Read((weights[..., None] * streams).sum(1), 2 * given.sigmoid(), mixture)

    def _balanced(self, mixture: Tensor) -> Tensor:
        """Divided by the sums of columns, then in turn by those of rows and columns."""
        eps = self._config.stream_eps
        mixture = mixture / (mixture.sum(1, keepdim=True) + eps)
        for _ in range(self._rounds - 1):
            mixture = mixture / (mixture.sum(2, keepdim=True) + eps)
            mixture = mixture / (mixture.sum(1, keepdim=True) + eps)
        return mixture

    @staticmethod
    def write(streams: Tensor, read: Read, made: Tensor) -> Tensor:
        """The streams behind a block that made `made` [tokens, hidden] of `read`."""
        return read.shares[..., None] * made[:, None] + read.mixture.transpose(1, 2) @ streams


class Ending:
    """Joins the streams into one, before the last norm."""

    def __init__(self, config: ModelConfig, source: Source) -> None:
        self._config = config
        self._product = source.values("hc_head_fn", config.stream_count, config.residual_dim)
        self._base = source.values("hc_head_base", config.stream_count)
        self._scale = source.values("hc_head_scale", 1)

    def __call__(self, streams: Tensor) -> Tensor:
        projected = F.linear(normed(streams.flatten(1), self._config.norm_eps), self._product)
        weights = (projected * self._scale + self._base).sigmoid() + self._config.stream_eps
        return (weights[..., None] * streams).sum(1)


def normed(x: Tensor, eps: float) -> Tensor:
    """Without weights, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
