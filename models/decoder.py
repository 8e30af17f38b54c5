"""The stage facade: a decoder layer as pure calls over explicit tensors, nothing hidden.

    entry  = layer.enter(hidden)               norm and down-projections
    probe  = layer.index(entry, rotation)      indexer queries, weights and new keys (full layers)
    asked  = layer.pre_attn(entry, rotation)   absorbed queries and the new rows
    ...    attend: the caller's; float32 [tokens, heads, latent] comes back
    hidden = layer.output(hidden, attended)
    hidden = layer.mlp(hidden)

No module keeps rows, keys or positions: the caller puts pools, fetches and merges between the
calls. `index` needs nothing from `pre_attn`, so a fetch can start before the queries are made.

Products take both sides in the type of the weights. Everything between two products is float32: the
residual stream, norms, rotations, gates and their sums. Queries alone are handed to attention in
the type of the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ess.comm.experts.expert_ranks import ExpertRanks, Part
from ess.kernels.cpu.stage import Stage
from ess.layout import ModelLayout
from ess.models.config import ModelConfig
from ess.models.guest.grouped import Grouped
from ess.models.indexer import Indexer, Probe
from ess.models.layers import Norm, Rotation, Source
from ess.models.mla import Mla, MlaShare
from ess.models.moe import Mlp, Moe

State = Mapping[str, Tensor]
"""What some sequences keep in a layer without rows, by field of `config_json.linear`; each is
[sequences, ...]."""


class Entry(NamedTuple):
    """A layer's normed input and its down-projections."""

    hidden: Tensor
    query: Tensor
    row: Tensor


class QueriesAndRows(NamedTuple):
    """Absorbed queries [tokens, heads, latent + rope] and new rows [tokens, latent + rope]."""

    queries: Tensor
    rows: Tensor


class Front(NamedTuple):
    """What a layer makes of its input in one go: rows and keys are bytes, ready for the pools.

    `query` is the normed low-rank query; what an indexer makes is there in full layers only.
    """

    query: Tensor
    rows: Tensor
    queries: Tensor | None = None
    weights: Tensor | None = None
    keys: Tensor | None = None


class DecoderLayer:
    def __init__(
        self,
        config: ModelConfig,
        source: Source,
        number: int,
        *,
        first: int = 0,
        tp: int = 1,
        expert_ranks: ExpertRanks | None = None,
    ) -> None:
        """Layer `number` of the whole model, its `place`. `first` is where its part begins: a layer
        is known by its number in the part."""
        attention = source.under("self_attn")
        self.number, self.place = number - first, number
        own, has_indexer = config.at_layer(number), config.has_indexer(number)
        self.mla = self._attention(own, attention, tp)
        self.indexer = self._indexer(own, attention.under("indexer")) if has_indexer else None
        self.experts = None
        if config.has_experts(number):
            self.experts = Moe(
                config, source.under("mlp"), number=number, expert_ranks=expert_ranks
            )
        self.dense = (
            None
            if self.experts
            else Mlp(
                source.under("mlp"),
                hidden_dim=config.hidden_dim,
                inner_dim=config.dense_dim,
                limit=config.dense_limit,
            )
        )
        self._hidden_dim = config.hidden_dim
        self._input_norm = self._norm(config, source.under("input_layernorm"))
        self._mlp_norm = self._norm_for_mlp(config, source.under("post_attention_layernorm"))
        self._compiled: CompiledLayer | None = None

    # ---- what families differ in

    window = 0
    """How many tokens it attends to, the last ones; 0: those that an indexer has selected."""

    has_rows = True
    """Whether tokens have rows in it; else its requests have a state, which `carry` reads."""

    has_stages = True
    """Whether a few tokens can run as compiled stages; else as ops of torch."""

    def _attention(self, config: ModelConfig, source: Source, tp: int) -> Mla | Grouped:
        if config.is_grouped:
            return Grouped(config, source)
        return Mla(config, source) if tp == 1 else MlaShare(config, source, tp=tp)

    def _indexer(self, config: ModelConfig, source: Source) -> Indexer:
        return Indexer(config, source)

    def turning(self, rotation: Rotation) -> Rotation:
        """The rotation of this layer, given the model's."""
        return rotation

    def _norm(self, config: ModelConfig, source: Source) -> Norm:
        return Norm(source, config.hidden_dim, config.norm_eps)

    def _norm_for_mlp(self, config: ModelConfig, source: Source) -> Norm:
        return Norm(source, config.hidden_dim, config.norm_eps)

    @property
    def is_divided(self) -> bool:
        """Whether this rank has a share of the experts: then the ranks meet in `mlp`."""
        return self.experts is not None and self.experts.is_divided

    @property
    def has_keys(self) -> bool:
        """Whether the pools keep an index key of each token for it."""
        return self.indexer is not None

    def first_state(self) -> State:
        """The state of one sequence before any token: [1, ...] each."""
        raise AssertionError(f"layer {self.number} has rows")

    def carry(self, hidden: Tensor, state: State) -> tuple[Tensor, State]:
        """`hidden` is [sequences, tokens, hidden]. What each token reads of the state of its
        sequence, [sequences, tokens, ...], and the states behind the last tokens."""
        raise AssertionError(f"layer {self.number} has rows")

    # ---- the stages

    def enter(self, hidden: Tensor) -> Entry:
        normed = self._input_norm(hidden)
        return Entry(normed, *self.mla.down(normed))

    def index(self, entry: Entry, rotation: Rotation) -> Probe:
        assert self.indexer is not None, f"layer {self.number} shares another layer's selection"
        return self.indexer.probe(entry.hidden, entry.query, self.turning(rotation))

    def pre_attn(self, entry: Entry, rotation: Rotation) -> QueriesAndRows:
        own = self.turning(rotation)
        return QueriesAndRows(self.mla.queries(entry.query, own), self.mla.rows(entry.row, own))

    def output(self, hidden: Tensor, attended: Tensor) -> Tensor:
        return hidden + self.mla.output(attended)

    def mlp_input(self, hidden: Tensor) -> Tensor:
        """What the experts see: for callers that route and dispatch themselves."""
        return self._mlp_norm(hidden)

    def mlp(self, hidden: Tensor, part: Part = "batch") -> Tensor:
        """The MLP of these tokens; `part` says which part of a step they are, if ranks divide the
        experts."""
        given = self.mlp_input(hidden)
        if self.experts is not None:
            return self.add_mlp(hidden, self.experts(given, part))
        assert self.dense is not None, f"layer {self.number} has no block behind its attention"
        return self.add_mlp(hidden, self.dense(given))

    def add_mlp(self, hidden: Tensor, made: Tensor) -> Tensor:
        return hidden + made

    def front_stage(self, layout: ModelLayout) -> Stage:
        stage = Stage()
        normed = self._input_norm.in_stage(stage, stage.take(self._hidden_dim))
        query, row = self.mla.project_in(stage, normed)
        stage.give(query, torch.float32)
        stage.give_row(row, layout.row_of(self.number))
        if self.indexer is not None:
            assert layout.index is not None, "an indexer without an index codec"
            self.indexer.probe_in(stage, normed, query, layout.index)
        return stage

    def back_stage(self) -> Stage:
        stage = Stage()
        hidden = stage.take(self._hidden_dim)
        self.mla.add_output(stage, hidden)
        block = self.experts or self.dense
        assert block is not None
        block.add_to(stage, self._mlp_norm.in_stage(stage, hidden), hidden)
        stage.give(hidden, torch.float32)
        return stage

    def compiled(self, layout: ModelLayout) -> CompiledLayer:
        """This layer as compiled stages: made once, with its own copy of the weights, for all
        engines of equal layouts."""
        made = self._compiled
        if made is None or (made.layout is not layout and made.layout != layout):
            made = self._compiled = CompiledLayer(self, layout)
        return made


class CompiledLayer:
    """A decoder layer for a few tokens: the stage facade's arithmetic in three native calls.

    What comes out of a product of bfloat16 is float32 here, where torch rounds it. What a token
    gets does not depend on the others.
    """

    def __init__(self, layer: DecoderLayer, layout: ModelLayout) -> None:
        self.layout = layout
        self._layer = layer

    @functools.cached_property
    def _front(self) -> Stage:
        return self._layer.front_stage(self.layout)

    @functools.cached_property
    def _queries(self) -> Stage:
        return self._layer.mla.query_stage()

    @functools.cached_property
    def _values(self) -> Stage:
        return self._layer.mla.value_stage()

    @functools.cached_property
    def _back(self) -> Stage:
        return self._layer.back_stage()

    def stages(self) -> tuple[Stage, Stage, Stage]:
        """What `front`, `queries` and `back` call."""
        return self._front, self._queries, self._back

    def front(self, hidden: Tensor, rotation: Rotation, *, threads: int = 1) -> Front:
        """`enter`, `index` and the new rows."""
        return Front(*self._front([hidden], turns=rotation.turns, threads=threads))

    def queries(self, query: Tensor, rotation: Rotation, *, threads: int = 1) -> Tensor:
        [queries] = self._queries([query], turns=rotation.turns, threads=threads)
        return queries

    def values(self, attended: Tensor, *, threads: int = 1) -> Tensor:
        """For a rank that has some of the heads."""
        [values] = self._values([attended], threads=threads)
        return values

    def back(self, hidden: Tensor, attended: Tensor, *, threads: int = 1) -> Tensor:
        """`output` and `mlp`."""
        [hidden] = self._back([hidden, attended], threads=threads)
        return hidden
