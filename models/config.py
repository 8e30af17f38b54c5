"""A Hugging Face config.json as a typed, validated value. Needs no torch.

Field names are ours; `msgspec.field(name=...)` says what the file calls them. In the folder
config_json, `reading` makes the value from a file and `config_checks` refuses values that
contradict each other.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, field

from ess.layout import (
    EXPERTS_MAX,
    IndexCodec,
    IndexForm,
    ModelLayout,
    RopeStyle,
    RowCodec,
    RowForm,
)
from ess.models.compressed.layout import layout_of
from ess.models.config_json.config_checks import check_codecs, check_sizes
from ess.models.config_json.linear import Pooled, Recurrent, Size, StateForm, state_form
from ess.models.config_json.rope import LENGTH_MAX, Positive, Rope, Share, Theta

LAYERS_MAX: Final = 4096
Layers = Annotated[int, Meta(ge=1, le=LAYERS_MAX)]
Count = Annotated[int, Meta(ge=0, le=1 << 24)]
Groups = tuple[tuple[int, ...], ...]

INDEX_NORM_EPS: Final = 1e-6


class FileConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys that the files of every family may have."""

    family: str = field(name="model_type")
    vocab_size: Size
    hidden_dim: Size = field(name="hidden_size")
    layer_count: Layers = field(name="num_hidden_layers")
    mtp_layer_count: Annotated[int, Meta(ge=0, le=1)] = field(
        name="num_nextn_predict_layers", default=0
    )
    positions_max: Annotated[int, Meta(ge=1, le=LENGTH_MAX)] = field(name="max_position_embeddings")
    norm_eps: Positive = field(name="rms_norm_eps")
    tie_head: bool = field(name="tie_word_embeddings", default=False)
    eos_ids: int | tuple[int, ...] = field(name="eos_token_id", default=())
    rope: Rope = field(name="rope_parameters")

    head_count: Size = field(name="num_attention_heads")
    query_rank: Size = field(name="q_lora_rank")
    latent_dim: Size = field(name="kv_lora_rank")
    nope_dim: Count = field(name="qk_nope_head_dim")
    rope_dim: Count = field(name="qk_rope_head_dim")
    value_dim: Size = field(name="v_head_dim")

    index_head_count: Size = field(name="index_n_heads")
    index_dim: Size = field(name="index_head_dim")
    top_k: Size = field(name="index_topk")
    index_rope_interleaved: bool = field(name="indexer_rope_interleave")
    index_freq: Size = field(name="index_topk_freq", default=1)
    index_skip_offset: Count = field(name="index_skip_topk_offset", default=2)
    indexer_kinds: tuple[Literal["full", "shared"], ...] = field(name="indexer_types", default=())
    mtp_shares_selection: bool = field(name="index_share_for_mtp_iteration", default=False)

    dense_dim: Size = field(name="intermediate_size")
    dense_layer_count: Count = field(name="first_k_dense_replace", default=3)
    mlp_kinds: tuple[Literal["dense", "sparse"], ...] = field(name="mlp_layer_types", default=())
    expert_dim: Size = field(name="moe_intermediate_size")
    expert_count: Annotated[int, Meta(ge=1, le=EXPERTS_MAX)] = field(name="n_routed_experts")
    shared_expert_count: Count = field(name="n_shared_experts", default=1)
    experts_per_token: Size = field(name="num_experts_per_tok")
    expert_group_count: Size = field(name="n_group")
    expert_groups_kept: Size = field(name="topk_group")
    expert_scale: Positive = field(name="routed_scaling_factor")
    expert_weights_normed: bool = field(name="norm_topk_prob", default=True)


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that attend to the last tokens alone, with heads and latents of other sizes."""

    size: Size = field(name="sliding_window")
    head_count: Size = field(name="swa_num_attention_heads")
    query_rank: Size = field(name="swa_q_lora_rank")
    latent_dim: Size = field(name="swa_kv_lora_rank")
    nope_dim: Size = field(name="swa_qk_nope_head_dim")
    value_dim: Size = field(name="swa_v_head_dim")
    theta: Theta = field(name="swa_rope_theta")


class Compressed(msgspec.Struct, frozen=True, kw_only=True):
    """Attention to entries, each made of several tokens, beside the last tokens as they are."""

    kinds: tuple[Literal["window", "sparse", "heavy"], ...]
    """For each layer: only the last tokens (window), also chosen entries (sparse), or also all
    entries, which have more tokens (heavy). The last is the MTP module's; `hashed` has it too."""
    window: Size = field(name="sliding_window")
    sparse_rate: Size
    heavy_rate: Size
    window_rope: Rope
    """The rotary embedding of layers that attend to the last tokens only."""
    output_groups: Size = field(name="o_groups")
    output_rank: Size = field(name="o_lora_rank")
    mixing_rounds: Size = field(name="hc_sinkhorn_iters")
    hashed: tuple[bool, ...]
    """For each layer: whether a table by token id says the experts."""
    expert_dtype: Literal["fp4", "fp8", "bfloat16"] = "bfloat16"
    """As a checkpoint stores routed experts."""

    def rate(self, layer: int) -> int:
        """How many tokens an entry is made of; 0 in a layer without entries."""
        rates = {"window": 0, "sparse": self.sparse_rate, "heavy": self.heavy_rate}
        return rates[self.kinds[layer]]


class ModelConfig(FileConfig, frozen=True, kw_only=True):
    """Also the fields of single families. Such a family reads the key itself, or sets the field
    without a key. In files of other families these keys are ignored."""

    expert_limit: Annotated[float, Meta(ge=0.0, le=1e12)] = field(name="swiglu_limit", default=0.0)
    """The bound on the two factors that routed experts multiply; 0: no bound."""
    stream_count: Annotated[int, Meta(ge=1, le=16)] = field(name="hc_mult", default=1)
    """Residual streams side by side."""
    stream_magnitude: Positive = field(name="hc_magnitude", default=2.0)
    stream_eps: Positive = field(name="hc_eps", default=1e-6)
    norm_gate_rank: Count = field(name="gated_norm_rank", default=0)
    """The rank of the gates behind the norms of inputs and of experts."""
    logit_cap: Share = field(name="final_logit_softcapping", default=0.0)
    """A hyperbolic tangent keeps logits within +- this; 0: no bound."""
    shared_dim: Count = field(name="shared_experts_intermediate_size", default=0)
    """The inner width of each shared expert; 0: that of routed experts."""
    window: Window | None = None
    window_layers: tuple[int, ...] = ()
    """The layers that attend as `window` says; each has a layer group and no indexer."""
    compressed: Compressed | None = None
    """For models that attend to entries of several tokens, not to selected rows."""
    pooled: Pooled | None = None
    """For indexers that choose units of tokens; `top_k` then includes the tokens behind the last
    whole unit."""
    recurrent: Recurrent | None = None
    recurrent_layers: tuple[int, ...] = ()
    """The layers of linear attention, which have no rows."""
    rope_keys_normed: bool = False
    still_layers: tuple[int, ...] = ()
    """Layers without rotary embedding: they multiply the whole query with the latent."""
    has_query_rank: bool = True
    """If false, queries are made of the layer's input, whose width is `query_rank`."""
    queries_grow: bool = False
    """Queries are multiplied by a * log(position) + b, with a and b of each head."""
    frequencies_learned: bool = False
    """The checkpoint has, for each rotary frequency, the logarithm of a factor."""
    expert_scores: Literal["sigmoid", "softmax", "sqrtsoftplus"] = "sigmoid"
    """sigmoid with a correction of the choice, softmax over all experts without one, sqrtsoftplus
    as in `ess.models.compressed`."""
    latent_norm_eps: Positive | None = None
    index_norm_eps: Positive = INDEX_NORM_EPS
    key_head_count: Count = 0
    """Heads of keys and values that lie side by side in a row; 0: the row is one latent."""
    value_gates: Literal["none", "query", "input", "head"] = "none"
    """What gates on values are computed from: the query, in the same product; or the layer's input,
    with a gate for each value or for each head."""
    has_sinks: bool = False
    expert_groups_zeroed: bool = False
    """Experts outside of the kept groups score 0; otherwise they cannot be chosen."""
    experts_stacked: bool = False
    """A checkpoint has each layer's experts in two tensors, gates and ups in one of them."""
    unread_prefixes: tuple[str, ...] = ()
    """Prefixes of the checkpoint's tensors that are not read."""
    words: tuple[tuple[str, str], ...] = ()
    """Replacements in the names of the checkpoint's tensors: theirs, ours; in order."""
    filled_rope_dim: Count = 0
    """In a layer's own configuration (`at_layer`): zeros behind its row, up to the width of the
    group's rows."""
    query_factor: Positive = 1.0
    """In a layer's own configuration: a factor on its queries, since all scores are multiplied by
    the model's scale."""
    reorders: bool = False
    """Weights lie in another order in the checkpoint than here (`ess.models.families.order`)."""

    def __post_init__(self) -> None:
        check_sizes(self)

    def has_indexer(self, layer: int) -> bool:
        """The MTP layer has one if rows are of tokens; others as listed, or by frequency."""
        if self.compressed is not None:
            return self.compressed.kinds[layer] == "sparse"
        if layer >= self.layer_count:
            return True
        if layer in self.window_layers or layer in self.recurrent_layers:
            return False
        if self.indexer_kinds:
            return self.indexer_kinds[layer] == "full"
        return max(layer - self.index_skip_offset + 1, 0) % self.index_freq == 0

    def has_experts(self, layer: int) -> bool:
        if self.mlp_kinds and layer < self.layer_count:
            return self.mlp_kinds[layer] == "sparse"
        return layer >= min(self.dense_layer_count, self.layer_count)

    def starts_group(self, layer: int) -> bool:
        """Whether it attends to a selection of its own, or to none."""
        others = layer in self.window_layers or layer in self.recurrent_layers
        return others or self.has_indexer(layer)

    @property
    def groups(self) -> Groups:
        """Layers that share one selection; the MTP layer is the last group."""
        starts = [n for n in range(self.layer_total) if self.starts_group(n)]
        ends = [*starts[1:], self.layer_total]
        return tuple(tuple(range(a, b)) for a, b in zip(starts, ends, strict=True))

    def at_layer(self, layer: int) -> ModelConfig:
        """The configuration as one layer's attention and indexer read it."""
        if layer in self.window_layers:
            return self._in_window()
        if layer in self.still_layers:
            nope, filled = self.nope_dim + self.rope_dim, self.row_rope_dim(layer)
            return msgspec.structs.replace(self, nope_dim=nope, rope_dim=0, filled_rope_dim=filled)
        return self

    def row_rope_dim(self, layer: int) -> int:
        """The rope dimensions of the rows that its group keeps: layers that share a selection have
        equal rows."""
        [group] = (group for group in self.groups if layer in group)
        return self._rope_dim_of(group)

    def _rope_dim_of(self, group: tuple[int, ...]) -> int:
        return 0 if all(layer in self.still_layers for layer in group) else self.rope_dim

    def _in_window(self) -> ModelConfig:
        w = self.window
        assert w is not None, "layers of no window"
        own = msgspec.structs.replace(
            self,
            head_count=w.head_count,
            query_rank=w.query_rank,
            latent_dim=w.latent_dim,
            nope_dim=w.nope_dim,
            value_dim=w.value_dim,
            rope=Rope(theta=w.theta),
        )
        factor = own.attention_scale / self.attention_scale
        return msgspec.structs.replace(own, query_factor=factor)

    def _row(self, form: RowForm, group: tuple[int, ...]) -> RowCodec:
        w = self.window if group[0] in self.window_layers else None
        latent_dim = self.latent_dim if w is None else w.latent_dim
        return RowCodec(form=form, latent_dim=latent_dim, rope_dim=self._rope_dim_of(group))

    def _windows(self) -> tuple[int, ...]:
        """The window of each layer group; none where all have an indexer."""
        size = self.window.size if self.window is not None else 0
        windows = tuple(size if group[0] in self.window_layers else 0 for group in self.groups)
        return windows if any(windows) else ()

    @property
    def layer_total(self) -> int:
        return self.layer_count + self.mtp_layer_count

    @property
    def is_grouped(self) -> bool:
        return self.key_head_count > 0

    @property
    def row_dim(self) -> int:
        """The width of a row as a layer makes it; a stored row may be wider."""
        return self.latent_dim + self.rope_dim

    @property
    def shared_width(self) -> int:
        """The width of all shared experts side by side."""
        return (self.shared_dim or self.expert_dim) * self.shared_expert_count

    @property
    def shared_limit(self) -> float:
        """The limit of what shared experts multiply; 0 is none."""
        return self.expert_limit if self.compressed or self.pooled else 0.0

    @property
    def dense_limit(self) -> float:
        """The limit of what dense blocks multiply; 0 is none."""
        return self.expert_limit if self.pooled else 0.0

    @property
    def select_unit(self) -> int:
        """Neighbouring tokens that are chosen together."""
        return self.pooled.unit if self.pooled else 1

    @property
    def mixing_rounds(self) -> int:
        """Rounds of division that balance the mixture of residual streams."""
        mixed = self.compressed or self.pooled
        assert mixed is not None, "streams of another family"
        return mixed.mixing_rounds

    @property
    def key_dim(self) -> int:
        """The size of what a token gives to indexers: pooled ones also get its key's weights."""
        return 2 * self.index_dim if self.pooled else self.index_dim

    @property
    def residual_dim(self) -> int:
        return self.stream_count * self.hidden_dim

    @property
    def index_rope_style(self) -> RopeStyle:
        return "interleaved" if self.index_rope_interleaved else "half"

    @property
    def query_latent_eps(self) -> float:
        """Eps of the norms on the two latents: the model's, as inference servers use it.

        transformers keeps 1e-6 there whatever rms_norm_eps says; to compare with it, set
        latent_norm_eps.
        """
        return self.norm_eps if self.latent_norm_eps is None else self.latent_norm_eps

    @property
    def usual_row(self) -> RowForm:
        """The form of rows unless a setting says otherwise: fp8 where the model was made for it."""
        return "bf16" if self.compressed is not None or self.is_grouped else "fp8"

    @property
    def attention_scale(self) -> float:
        return float((self.nope_dim + self.rope_dim) ** -0.5 * self.rope.softmax_scale)

    @property
    def row_layers(self) -> tuple[int, ...]:
        """The main layers with rows. The pools count these alone."""
        return tuple(n for n in range(self.layer_count) if n not in self.recurrent_layers)

    @property
    def row_groups(self) -> Groups:
        """The groups of the main layers with rows, as a layout of this model counts them."""
        if self.compressed is not None:
            return tuple((n,) for n in range(self.compressed.kinds.count("sparse")))
        return self.without_mtp()._with_rows().groups

    def _with_rows(self) -> ModelConfig:
        """The numbers of its layers that have rows."""
        if not self.recurrent_layers:
            return self
        kept = self.row_layers
        return msgspec.structs.replace(
            self,
            layer_count=len(kept),
            indexer_kinds=tuple("full" if self.has_indexer(n) else "shared" for n in kept),
            mlp_kinds=tuple("sparse" if self.has_experts(n) else "dense" for n in kept),
            recurrent_layers=(),
        )

    @property
    def states(self) -> StateForm:
        """What a request keeps beside its rows, where its family's entries do not say it."""
        return state_form(self)

    def without_mtp(self) -> ModelConfig:
        return msgspec.structs.replace(self, mtp_layer_count=0)

    def layout(
        self,
        *,
        name: str = "",
        row: RowForm = "fp8",
        index: IndexForm | None = None,
        has_mtp: bool = True,
    ) -> ModelLayout:
        """What the pools need to know. The slot floor is 25/8 of what an indexer chooses, at least
        1,024. Index keys are in fp8 unless it is said; of entries in float32 as these are. A step
        that verifies one token needs no MTP layers: without `has_mtp` they are left out."""
        if not has_mtp:
            return self.without_mtp().layout(name=name, row=row, index=index)
        if self.compressed is not None:
            keys = index or ("f32" if row == "f32" else "fp8")
            return layout_of(self, name=name, row=row, index=keys)
        index = index or "fp8"
        check_codecs(self, row, index)
        kept = self._with_rows()
        rows = tuple(kept._row(row, group) for group in kept.groups)
        return ModelLayout(
            name=name or self.family,
            layer_count=kept.layer_count,
            groups=kept.groups,
            row=max(rows, key=lambda each: each.row_bytes),
            rows=rows if len(set(rows)) > 1 else (),
            index=IndexCodec(
                form=index,
                key_dim=self.index_dim,
                unit=self.select_unit,
                hadamard=self.pooled is None,
                head_count=self.index_head_count,
                rope_style=self.index_rope_style,
            ),
            top_k=self.top_k,
            mtp_layer_count=self.mtp_layer_count,
            head_count=self.head_count,
            hidden_dim=self.hidden_dim,
            nope_dim=self.nope_dim,
            value_dim=self.value_dim,
            query_rank=self.query_rank,
            slot_floor=max(1024, 25 * (self.top_k + 1 - self.select_unit) // 8),
            windows=self._windows(),
            state_bytes=self.states.byte_count,
        )
