"""A model, or a part of it: embedding, decoder layers, final norm, head, the optional MTP module.

A part is a run of consecutive layers. The first part has the embedding; the last has the final
norm, the head, the MTP module and, for that module, the embedding once more.
"""

from __future__ import annotations

import functools
from typing import Protocol, TypeVar, Unpack

import torch
from torch import Tensor

from ess.comm.experts.expert_ranks import ExpertRanks
from ess.kernels.cpu import native, step
from ess.kernels.cpu.codes import CodedWeight
from ess.kernels.cpu.stage import Panels, Stage, pack
from ess.layout import check_part
from ess.models.config import ModelConfig
from ess.models.decoder import DecoderLayer
from ess.models.layers import (
    RotaryPositions,
    Rotation,
    Source,
    TensorSource,
    keep_sums_whole,
    linear_f32,
    rms_norm,
)
from ess.models.mtp import Mtp
from ess.models.part import LayerPlace
from ess.models.weights.expected.shapes import FREQUENCY_FACTORS
from ess.models.weights.kept import Weight, packable, plain

W = TypeVar("W", bound=Weight)


class LayerKind(Protocol):
    def __call__(
        self,
        config: ModelConfig,
        source: Source,
        number: int,
        **place: Unpack[LayerPlace],
    ) -> DecoderLayer: ...


class Model:
    def __init__(
        self,
        config: ModelConfig,
        tensor: TensorSource,
        *,
        layers: range | None = None,
        tp: int = 1,
        expert_ranks: ExpertRanks | None = None,
        layer: LayerKind = DecoderLayer,
    ) -> None:
        """`config` is the whole model's, and so are the numbers in `layers`. With `tp` ranks in a
        team `tensor` gives one rank's share of what is cut by heads (`Split`). `layer` is the
        family's kind of main layer."""
        c, source = config, Source(tensor)
        part = range(c.layer_count) if layers is None else layers
        check_part(c.groups, c.layer_count, part.start, part.stop)
        self.config = c
        self.expert_ranks = expert_ranks
        self.is_first, self.is_last = part.start == 0, part.stop == c.layer_count
        table = self._table_of(source)
        self._embedding = None if table is None else plain(table)
        self.layers = tuple(
            layer(
                c,
                source.under(f"model.layers.{number}"),
                number,
                first=part.start,
                tp=tp,
                expert_ranks=expert_ranks,
            )
            for number in part
        )
        self._take_ending(source, table)
        has_mtp = self.is_last and c.mtp_layer_count
        self.mtp = (
            Mtp(c, source, first=part.start, tp=tp, expert_ranks=expert_ranks) if has_mtp else None
        )
        self.device = self.layers[0].mla.device
        keep_sums_whole(self.device)
        self.rotary = RotaryPositions(c, self.device, self._factors(source))

    @property
    def has_stages(self) -> bool:
        return all(layer.has_stages for layer in self.layers)

    def _factors(self, source: Source) -> Tensor | None:
        """The factors of the rotary frequencies."""
        if not self.config.frequencies_learned:
            return None
        return source.vector(FREQUENCY_FACTORS, self.config.rope_dim // 2).exp()

    def _table_of(self, source: Source) -> Weight | None:
        c = self.config
        is_read = self.is_first or (self.is_last and (c.mtp_layer_count > 0 or c.tie_head))
        return source.weight("model.embed_tokens", c.vocab_size, c.hidden_dim) if is_read else None

    def _take_ending(self, source: Source, table: Weight | None) -> None:
        c = self.config
        self._norm: Tensor | None = None
        self._head: Weight | None = None
        if self.is_last:
            self._norm = source.vector("model.norm.weight", c.hidden_dim)
            if not c.tie_head:
                self._head = packable(source.weight("lm_head", c.vocab_size, c.hidden_dim))
            else:
                self._head = table if isinstance(table, CodedWeight) else self._embedding

    def embed(self, tokens: Tensor) -> Tensor:
        table = self._embedding
        assert table is not None, "this part of the model has no embedding"
        if self._embeds_natively and tokens.dtype == torch.int64 and tokens.is_contiguous():
            made = step.embedded(table, tokens)
            if made is not None:
                return made
        return torch.embedding(table, tokens).float()

    @functools.cached_property
    def _embeds_natively(self) -> bool:
        table = self._embedding
        if table is None or not (table.is_cpu and table.is_contiguous()):
            return False
        return table.dtype in (torch.float32, torch.bfloat16) and native.available()

    def rotation(self, positions: Tensor) -> Rotation:
        """Shared by all layers of a step; positions int [tokens]."""
        return self.rotary.at(positions)

    def finish(self, hidden: Tensor) -> Tensor:
        """The final norm: what the head and the MTP module read."""
        return rms_norm(hidden, self._last(self._norm), self.config.norm_eps)

    def logits(self, finished: Tensor) -> Tensor:
        logits, cap = linear_f32(finished, self._last(self._head)), self.config.logit_cap
        return cap * (logits / cap).tanh() if cap else logits

    @functools.cached_property
    def ending(self) -> Stage:
        """For a few tokens, compiled: hidden -> what `finish` and `logits` make of it."""
        return self._ending(self._last(self._norm))

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
        return pack(packable(self._last(self._head)))

    def _last(self, weight: W | None) -> W:
        assert weight is not None, "only the last part of a model has a norm and a head"
        return weight
