"""A whole model: embedding, decoder layers, final norm, head and the optional MTP module."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ess.kernels.cpu.stage import Panels, Stage, pack
from ess.models.config import ModelConfig
from ess.models.decoder import DecoderLayer
from ess.models.layers import RotaryPositions, Rotation, Source, TensorSource, linear, rms_norm
from ess.models.mtp import Mtp


class Model:
    def __init__(self, config: ModelConfig, tensor: TensorSource) -> None:
        c, source = config, Source(tensor)
        self.config = c
        self._embedding = source.matrix("model.embed_tokens", c.vocab_size, c.hidden_dim)
        self.layers = tuple(
            DecoderLayer(c, source.under(f"model.layers.{number}"), number)
            for number in range(c.layer_count)
        )
        self._norm = source.vector("model.norm.weight", c.hidden_dim)
        self._head = (
            self._embedding if c.tie_head else source.matrix("lm_head", c.vocab_size, c.hidden_dim)
        )
        self.mtp = Mtp(c, source) if c.mtp_layer_count else None
        self._positions = RotaryPositions(c)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._embedding[tokens].float()

    def rotation(self, positions: Tensor) -> Rotation:
        """Shared by all layers of a step; positions int [tokens]."""
        return self._positions.at(positions)

    def finish(self, hidden: Tensor) -> Tensor:
        """The final norm: what the head and the MTP module read."""
        return rms_norm(hidden, self._norm, self.config.norm_eps)

    def logits(self, finished: Tensor) -> Tensor:
        return linear(finished, self._head)

    @functools.cached_property
    def ending(self) -> Stage:
        """For a few tokens, compiled: hidden -> what `finish` and `logits` make of it."""
        return self._ending(self._norm)

    @functools.cached_property
    def draft_ending(self) -> Stage:
        """The same behind the MTP module's layer."""
        assert self.mtp is not None, "drafts need an MTP module"
        return self._ending(self.mtp.norm)

    def _ending(self, norm: Tensor) -> Stage:
        stage = Stage()
        finished = stage.norm(stage.take(self.config.hidden_dim), norm, self.config.norm_eps)
        stage.give(finished, torch.float32)
        stage.give(stage.linear(finished, self._panels), torch.float32)
        return stage

    @functools.cached_property
    def _panels(self) -> Panels:
        return pack(self._head)
