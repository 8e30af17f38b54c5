"""Several residual streams side by side (Hy4's independent hyper-connections).

A hidden state is [tokens, streams * hidden]. A block reads one sum of the streams and adds what it
makes to each of them; the shares of both are sigmoids of a small product of all streams together.
"""

from __future__ import annotations

from typing import Unpack

import torch.nn.functional as F
from torch import Tensor

from ess.models.config import ModelConfig
from ess.models.decoder import DecoderLayer, Entry
from ess.models.families.layers.gates import InputGatedMla
from ess.models.layers import Source
from ess.models.model import Model
from ess.models.part import LayerPlace
from ess.models.weights.kept import Weight, plain


class Streams:
    """`count` shares of each stream, float32 [tokens, streams] each."""

    def __init__(self, config: ModelConfig, source: Source, prefix: str, count: int) -> None:
        self._config, self._count = config, count
        c = config
        self._product = source.values(f"{prefix}fn", count * c.stream_count, c.residual_dim)
        self._base = source.values(f"{prefix}base", count * c.stream_count)
        self._scale = source.values(f"{prefix}scale", count)

    def shares(self, hidden: Tensor) -> tuple[Tensor, ...]:
        flat = hidden.float()
        size = (flat.square().mean(-1, keepdim=True) + self._config.norm_eps).rsqrt()
        mixed = F.linear(flat, self._product) * size
        scale = self._scale.repeat_interleave(self._config.stream_count)
        return (mixed * scale + self._base).sigmoid().chunk(self._count, -1)

    def read(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden]: what a block gets."""
        share = self.shares(hidden)[0] + self._config.stream_eps
        return (share[..., None] * self._apart(hidden)).sum(1)

    def write(self, hidden: Tensor, made: Tensor) -> Tensor:
        """Each stream, with its share of what a block has made of it."""
        c = self._config
        share = c.stream_magnitude * self.shares(hidden)[1] + c.stream_eps
        return (share[..., None] * made.float()[:, None] + self._apart(hidden)).flatten(1)

    def _apart(self, hidden: Tensor) -> Tensor:
        return hidden.float().view(len(hidden), self._config.stream_count, -1)


class StreamLayer(DecoderLayer):
    mla: InputGatedMla
    has_stages = False

    def __init__(
        self, config: ModelConfig, source: Source, number: int, **place: Unpack[LayerPlace]
    ) -> None:
        super().__init__(config, source, number, **place)
        self._around_mla = Streams(config, source.under("hc_attn_layer"), "hc_", 2)
        self._around_mlp = Streams(config, source.under("hc_mlp_layer"), "hc_", 2)

    def _attention(self, config: ModelConfig, source: Source, tp: int) -> InputGatedMla:
        return InputGatedMla(config, source)

    def enter(self, hidden: Tensor) -> Entry:
        return super().enter(self._around_mla.read(hidden))

    def output(self, hidden: Tensor, attended: Tensor) -> Tensor:
        normed = self._input_norm(self._around_mla.read(hidden))
        return self._around_mla.write(hidden, self.mla.gated_output(normed, attended))

    def mlp_input(self, hidden: Tensor) -> Tensor:
        return super().mlp_input(self._around_mlp.read(hidden))

    def add_mlp(self, hidden: Tensor, made: Tensor) -> Tensor:
        return self._around_mlp.write(hidden, made)


class StreamModel(Model):
    def _take_ending(self, source: Source, table: Weight | None) -> None:
        super()._take_ending(source, table)
        if self.is_last:
            self._joined = Streams(self.config, source.under("model.hc_head"), "hc_head_", 1)
            self._head = plain(self._last(self._head)).float()

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens).repeat(1, self.config.stream_count)

    def finish(self, hidden: Tensor) -> Tensor:
        return super().finish(self._joined.read(hidden))
