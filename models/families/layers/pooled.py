"""Indexers that choose neighbouring tokens together, and mixed residual streams (GLM-5-next).

For each token an indexer keeps its key, followed by the weight of each of the key's dimensions in
the one key of its unit; the weights of the places within a unit are included.
"""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from ess.models.compressed.streams import Mixing, Read
from ess.models.config import ModelConfig
from ess.models.decoder import DecoderLayer, Entry
from ess.models.indexer import Indexer, Probe
from ess.models.layers import Rotation, Source
from ess.models.mla import Mla
from ess.models.model import Model
from ess.models.part import LayerPlace


class PooledIndexer(Indexer):
    def __init__(self, config: ModelConfig, source: Source) -> None:
        super().__init__(config, source)
        dim, name = config.index_dim, "index_kpool_compress_"
        self._places = source.values(f"{name}ape", config.select_unit, dim)
        self._weights = source.values(f"{name}gate", dim, config.hidden_dim)

    def probe(self, hidden: Tensor, query: Tensor, rotation: Rotation) -> Probe:
        queries, weights, keys = super().probe(hidden, query, rotation)
        place = self._places[rotation.positions.long() % len(self._places)]
        return Probe(
            queries, weights, torch.cat((keys, F.linear(hidden.float(), self._weights) + place), -1)
        )

    def key_finish(self, rotation: Rotation) -> None:
        """None: no op mixes keys."""
        return


class MixedLayer(DecoderLayer):
    """Hidden states are [tokens, streams * hidden]."""

    mla: Mla
    has_stages = False

    def __init__(
        self, config: ModelConfig, source: Source, number: int, **place: Unpack[LayerPlace]
    ) -> None:
        super().__init__(config, source, number, **place)
        self._around_mla = Mixing(config, source, "hc_attn_")
        self._around_mlp = Mixing(config, source, "hc_ffn_")

    def _indexer(self, config: ModelConfig, source: Source) -> Indexer:
        return PooledIndexer(config, source)

    def normed(self, hidden: Tensor) -> Tensor:
        """The input of attention."""
        return self._input_norm(self._read(self._around_mla, hidden).sum)

    def made(self, normed: Tensor, attended: Tensor) -> Tensor:
        """The output of attention, [tokens, hidden]."""
        return self.mla.output(attended)

    def enter(self, hidden: Tensor) -> Entry:
        return super().enter(self._read(self._around_mla, hidden).sum)

    def output(self, hidden: Tensor, attended: Tensor) -> Tensor:
        read = self._read(self._around_mla, hidden)
        return self._write(hidden, read, self.made(self._input_norm(read.sum), attended))

    def mlp_input(self, hidden: Tensor) -> Tensor:
        return super().mlp_input(self._read(self._around_mlp, hidden).sum)

    def add_mlp(self, hidden: Tensor, made: Tensor) -> Tensor:
        return self._write(hidden, self._read(self._around_mlp, hidden), made)

    def _read(self, around: Mixing, hidden: Tensor) -> Read:
        return around.read(self._apart(hidden))

    def _write(self, hidden: Tensor, read: Read, made: Tensor) -> Tensor:
        return Mixing.write(self._apart(hidden), read, made.float()).flatten(1)

    def _apart(self, hidden: Tensor) -> Tensor:
        return hidden.float().view(len(hidden), -1, self._hidden_dim)


class MixedModel(Model):
    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens).repeat(1, self.config.stream_count)

    def finish(self, hidden: Tensor) -> Tensor:
        """Ends with the mean of all streams."""
        return super().finish(hidden.view(len(hidden), -1, self.config.hidden_dim).mean(1))
