"""The shape formula: every tensor that a configuration promises.

It closes on the published checkpoints: DeepSeek-V3.2 has 92,425 tensors in 689,471,107,200 bytes,
GLM-5.2 has 59,585 tensors of 753,329,940,480 values. So a checkpoint can be verified name by name,
and a plan can be made without one.

The families share one table. DeepSeek and GLM differ in sizes, in which layers own an indexer, and
in the MTP layer, where DeepSeek stores copies of the embedding and the head and GLM does not; a
guest has Llama's attention instead, and no experts. A.X-K2 and Hy4 have gates, Hy4 also sinks and
residual streams. DeepSeek-V4 has a table of its own, in `ess.models.compressed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from ess.errors import BadInput
from ess.models.compressed.shapes import compressed_tensors
from ess.models.config import ModelConfig
from ess.models.weights.stored import QUANT_BLOCK, Role
from ess.units import div_ceil

SCALE_SUFFIX: Final = "_scale_inv"
TENSOR_COUNT_MAX: Final = 500_000
HEAD: Final = "lm_head.weight"
FREQUENCY_FACTORS: Final = "model.rotary_emb.alpha"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How tensor parallelism may cut a tensor: along `dim`, into at most `part_count` pieces."""

    dim: int
    part_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One tensor that the configuration implies. `layer` None is the outside of the stack, `expert`
    a routed expert."""

    name: str
    shape: tuple[int, ...]
    role: Role
    cut: Cut | None = None
    layer: int | None = None
    expert: int | None = None
    optional: bool = False

    @property
    def scale_name(self) -> str:
        return self.name + SCALE_SUFFIX


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """One scale per block of 128 x 128; 576 rows have 5 rows of scales."""
    return tuple(div_ceil(side, QUANT_BLOCK) for side in shape)


def expected_tensors(config: ModelConfig, *, mtp: bool = True) -> list[Spec]:
    """All weights in the order of use. Scales are not listed: they follow from fp8 weights."""
    _check_count(config)
    if config.compressed is not None:
        return [Spec(**shape._asdict()) for shape in compressed_tensors(config, mtp=mtp)]
    specs = list(_outside(config))
    for layer in range(config.layer_total if mtp else config.layer_count):
        specs += _decoder_layer(config, layer)
        if layer >= config.layer_count:
            specs += _mtp_extras(config, layer)
    return specs


def _check_count(config: ModelConfig) -> None:
    """Before anything is listed: a hostile configuration must not exhaust memory."""
    sparse_count = sum(config.has_experts(layer) for layer in range(config.layer_total))
    tensor_count = sparse_count * config.expert_count * 3
    if tensor_count > TENSOR_COUNT_MAX:
        raise BadInput(
            f"config.json asks for {tensor_count:,} tensors; the bound is {TENSOR_COUNT_MAX:,}"
        )


def _outside(config: ModelConfig) -> Iterator[Spec]:
    shape = (config.vocab_size, config.hidden_dim)
    cut = Cut(dim=0, part_count=config.vocab_size)
    yield Spec(name="model.embed_tokens.weight", shape=shape, role="table", cut=cut)
    yield Spec(name="model.norm.weight", shape=(config.hidden_dim,), role="norm")
    if config.frequencies_learned:
        pairs = (config.rope_dim // 2,)
        yield Spec(name=FREQUENCY_FACTORS, shape=pairs, role="norm")
    if config.stream_count > 1 and config.pooled is None:
        yield from _streams(config, "model.hc_head.hc_head_", 1, None)
    yield Spec(name=HEAD, shape=shape, role="table", cut=cut, optional=config.tie_head)


def _decoder_layer(config: ModelConfig, layer: int) -> Iterator[Spec]:
    prefix = f"model.layers.{layer}."
    yield from _norm(config, layer, f"{prefix}input_layernorm.", config.norm_gate_rank)
    attention = _grouped_attention if config.is_grouped else _attention
    if layer in config.recurrent_layers:
        attention = _recurrent
    yield from attention(config.at_layer(layer), layer, f"{prefix}self_attn.")
    if config.has_indexer(layer):
        yield from _indexer(config, layer, f"{prefix}self_attn.indexer.")
    rank = config.norm_gate_rank if config.has_experts(layer) else 0
    yield from _norm(config, layer, f"{prefix}post_attention_layernorm.", rank)
    if config.pooled is not None:
        for block in ("attn", "ffn"):
            yield from _mixings(config, f"{prefix}hc_{block}_", layer)
    elif config.stream_count > 1:
        for room in ("hc_attn_layer", "hc_mlp_layer"):
            yield from _streams(config, f"{prefix}{room}.hc_", 2, layer)
    if config.has_experts(layer):
        yield from _experts(config, layer, f"{prefix}mlp.")
    else:
        yield from _mlp(config, layer, f"{prefix}mlp.", width=config.dense_dim)


def _streams(config: ModelConfig, prefix: str, count: int, layer: int | None) -> Iterator[Spec]:
    """Tensors of `count` shares for each residual stream."""
    shares = count * config.stream_count
    for name, shape in (("fn", (shares, config.residual_dim)), ("base", (shares,))):
        yield Spec(name=f"{prefix}{name}", shape=shape, role="norm", layer=layer)
    yield Spec(name=f"{prefix}scale", shape=(count,), role="norm", layer=layer)


def _mixings(config: ModelConfig, prefix: str, layer: int) -> Iterator[Spec]:
    """The weights that mix streams: what is taken of each stream, what is given to each, and what
    goes from each to each."""
    shares = (2 + config.stream_count) * config.stream_count
    for name, shape in (
        ("fn", (shares, config.residual_dim)),
        ("base", (shares,)),
        ("scale", (3,)),
    ):
        yield Spec(name=f"{prefix}{name}", shape=shape, role="norm", layer=layer)


def _recurrent(config: ModelConfig, layer: int, prefix: str) -> Iterator[Spec]:
    """Not cut yet: its heads are independent, but nothing serves them."""
    own, hidden = config.recurrent, config.hidden_dim
    assert own is not None, "layers of no linear attention"
    heads, dim = own.head_count, own.head_dim
    for name, shape in (
        *((f"{part}_proj.weight", (heads * dim, hidden)) for part in "qkv"),
        ("f_a_proj.weight", (dim, hidden)),
        ("f_b_proj.weight", (heads * dim, dim)),
        ("g_a_proj.weight", (dim, hidden)),
        ("g_b_proj.weight", (heads * dim, dim)),
        ("b_proj.weight", (heads, hidden)),
        ("o_proj.weight", (hidden, heads * dim)),
    ):
        yield Spec(name=prefix + name, shape=shape, role="linear", layer=layer)
    small: dict[str, tuple[int, ...]] = {
        **{f"{part}_conv1d.weight": (heads * dim, 1, own.kernel) for part in "qkv"},
        "dt_bias": (heads * dim,),
        "A_log": (heads,),
        "o_norm.weight": (dim,),
    }
    for name, of in small.items():
        yield Spec(name=prefix + name, shape=of, role="norm", layer=layer)


def _norm(config: ModelConfig, layer: int, prefix: str, gate_rank: int) -> Iterator[Spec]:
    """The tensors of a norm, and of the gate behind it where `gate_rank` is not 0."""
    dim, inner = config.hidden_dim, "norm." if gate_rank else ""
    yield Spec(name=f"{prefix}{inner}weight", shape=(dim,), role="norm", layer=layer)
    if gate_rank:
        for name, shape in (("W_down", (gate_rank, dim)), ("W_up", (dim, gate_rank))):
            full_name = f"{prefix}{name}.weight"
            yield Spec(name=full_name, shape=shape, role="table", layer=layer)


def _attention(config: ModelConfig, layer: int, prefix: str) -> Iterator[Spec]:
    heads = config.head_count
    query_dim, from_dim = config.nope_dim + config.rope_dim, config.query_rank
    if config.value_gates == "query":
        query_dim, from_dim = query_dim + config.value_dim, 2 * from_dim
    by_head = Cut(dim=0, part_count=heads)

    def linear(name: str, rows: int, columns: int, cut: Cut | None = None) -> Spec:
        name = f"{prefix}{name}.weight"
        return Spec(name=name, shape=(rows, columns), role="linear", cut=cut, layer=layer)

    def norm(name: str, width: int) -> Spec:
        return Spec(name=f"{prefix}{name}.weight", shape=(width,), role="norm", layer=layer)

    if config.has_query_rank:
        yield linear("q_a_proj", config.query_rank, config.hidden_dim)
        yield norm("q_a_layernorm", config.query_rank)
    queries = "q_b_proj" if config.has_query_rank else "q_proj"
    yield linear(queries, heads * query_dim, from_dim, by_head)
    yield linear("kv_a_proj_with_mqa", config.row_dim, config.hidden_dim)
    yield norm("kv_a_layernorm", config.latent_dim)
    if config.rope_keys_normed:
        yield norm("k_rope_only_layernorm", config.rope_dim)
    both_dims = config.nope_dim + config.value_dim
    yield linear("kv_b_proj", heads * both_dims, config.latent_dim, by_head)
    out_cut = Cut(dim=1, part_count=heads)
    yield linear("o_proj", config.hidden_dim, heads * config.value_dim, out_cut)
    if config.value_gates == "input":
        yield linear("linear_gate", heads * config.value_dim, config.hidden_dim, by_head)
    if config.value_gates == "head":
        yield linear("g_proj", heads, config.hidden_dim)
    if config.has_sinks:
        yield Spec(name=f"{prefix}learnable_sink_param", shape=(heads,), role="norm", layer=layer)
    yield from _growth(config, layer, prefix, heads)


def _growth(config: ModelConfig, layer: int, prefix: str, heads: int) -> Iterator[Spec]:
    for name in ("scale", "bias") if config.queries_grow else ():
        full_name = f"{prefix}softmax_scaling.{name}"
        yield Spec(name=full_name, shape=(heads,), role="norm", layer=layer)


def _grouped_attention(config: ModelConfig, layer: int, prefix: str) -> Iterator[Spec]:
    """Not cut: a rank's rows hold the keys and values of all heads."""
    queries, keys = config.query_rank, config.key_head_count * config.value_dim
    for name, rows, columns in (
        ("q_proj", queries, config.hidden_dim),
        ("k_proj", keys, config.hidden_dim),
        ("v_proj", keys, config.hidden_dim),
        ("o_proj", config.hidden_dim, queries),
    ):
        full_name = f"{prefix}{name}.weight"
        yield Spec(name=full_name, shape=(rows, columns), role="linear", layer=layer)


def _indexer(config: ModelConfig, layer: int, prefix: str) -> Iterator[Spec]:
    """Not cut by tensor parallelism: every rank must pick the same rows."""
    key_dim, heads = config.index_dim, config.index_head_count
    for name, shape, role in (
        ("wq_b.weight", (heads * key_dim, config.query_rank), "linear"),
        ("wk.weight", (key_dim, config.hidden_dim), "linear"),
        ("k_norm.weight", (key_dim,), "norm"),
        ("k_norm.bias", (key_dim,), "norm"),
        ("weights_proj.weight", (heads, config.hidden_dim), "table"),
    ):
        full_name = prefix + name
        yield Spec(name=full_name, shape=shape, role=role, layer=layer)  # type: ignore[arg-type]
    if config.pooled is not None:
        for name, rows, width in (
            ("ape", config.select_unit, key_dim),
            ("gate", key_dim, config.hidden_dim),
        ):
            full_name, shape = f"{prefix}index_kpool_compress_{name}", (rows, width)
            yield Spec(name=full_name, shape=shape, role="table", layer=layer)
    for name in () if config.has_query_rank else ("weight", "bias"):
        full_name = f"{prefix}q_input_norm.{name}"
        yield Spec(name=full_name, shape=(config.hidden_dim,), role="norm", layer=layer)
    yield from _growth(config, layer, prefix, heads)


def _mlp(
    config: ModelConfig, layer: int, prefix: str, *, width: int, expert: int | None = None
) -> Iterator[Spec]:
    """Without shared experts their width is 0, and transformers writes tensors of no values."""
    for name, shape, dim in (
        ("gate_proj", (width, config.hidden_dim), 0),
        ("up_proj", (width, config.hidden_dim), 0),
        ("down_proj", (config.hidden_dim, width), 1),
    ):
        yield Spec(
            name=f"{prefix}{name}.weight",
            shape=shape,
            role="linear",
            cut=Cut(dim=dim, part_count=width),
            layer=layer,
            expert=expert,
            optional=width == 0,
        )


def _experts(config: ModelConfig, layer: int, prefix: str) -> Iterator[Spec]:
    count, width = config.expert_count, config.expert_dim
    gate = (count, config.hidden_dim)
    yield Spec(name=f"{prefix}gate.weight", shape=gate, role="table", layer=layer)
    if config.expert_scores == "sigmoid":
        bias = f"{prefix}gate.e_score_correction_bias"
        yield Spec(name=bias, shape=(count,), role="correction", layer=layer)
    if config.experts_stacked:
        yield from _stacked_experts(config, layer, f"{prefix}experts.")
    for expert in range(0 if config.experts_stacked else count):
        yield from _mlp(config, layer, f"{prefix}experts.{expert}.", width=width, expert=expert)
    yield from _mlp(config, layer, f"{prefix}shared_experts.", width=config.shared_width)


def _stacked_experts(config: ModelConfig, layer: int, prefix: str) -> Iterator[Spec]:
    count, width, hidden = config.expert_count, config.expert_dim, config.hidden_dim
    for name, shape in (
        ("gate_up_proj", (count, 2 * width, hidden)),
        ("down_proj", (count, hidden, width)),
    ):
        yield Spec(name=f"{prefix}{name}", shape=shape, role="table", layer=layer)


def _mtp_extras(config: ModelConfig, layer: int) -> Iterator[Spec]:
    prefix, hidden = f"model.layers.{layer}.", config.hidden_dim
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield Spec(name=f"{prefix}{name}.weight", shape=(hidden,), role="norm", layer=layer)
    joined = (hidden, 2 * hidden)
    yield Spec(name=f"{prefix}eh_proj.weight", shape=joined, role="table", layer=layer)
    for name in ("embed_tokens", "shared_head.head") if config.family == "deepseek_v32" else ():
        yield Spec(
            name=f"{prefix}{name}.weight",
            shape=(config.vocab_size, hidden),
            role="table",
            cut=Cut(dim=0, part_count=config.vocab_size),
            layer=layer,
            optional=True,
        )
