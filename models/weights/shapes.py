"""The shape formula: every tensor that a configuration promises.

It closes on the published checkpoints: DeepSeek-V3.2 has 92,425 tensors in 689,471,107,200 bytes,
GLM-5.2 has 59,585 tensors of 753,329,940,480 values. So a checkpoint can be verified name by name,
and a plan can be made without one.

Both families share one table. They differ in sizes, in which layers own an indexer, and in the MTP
layer, where DeepSeek stores copies of the embedding and the head and GLM does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ess.models.weights.dims import QUANT_BLOCK, Dims
from ess.units import div_ceil

# linear: may be stored as fp8 blocks with scales. table: never quantised. norm: f32 or bf16.
# correction: the gate's bias, f32 in every release.
Role = Literal["linear", "table", "norm", "correction"]

SCALE_SUFFIX = "_scale_inv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How tensor parallelism may cut a tensor: along `dim`, into at most `part_count` pieces."""

    dim: int
    part_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One promised tensor. `layer` None is the outside of the stack, `expert` a routed expert."""

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

    @property
    def value_count(self) -> int:
        return math.prod(self.shape)


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """One scale per block of 128 x 128; 576 rows have 5 rows of scales."""
    return tuple(div_ceil(side, QUANT_BLOCK) for side in shape)


def expected_tensors(dims: Dims, *, mtp: bool = True) -> list[Spec]:
    """All weights in the order of use. Scales are not listed: they follow from fp8 weights."""
    specs = list(_outside(dims))
    for layer in range(dims.layer_count):
        specs += _decoder_layer(dims, layer, sparse=dims.sparse[layer], indexed=dims.indexed[layer])
    for layer in range(dims.layer_count, dims.layer_total if mtp else 0):
        specs += _decoder_layer(dims, layer, sparse=True, indexed=True)
        specs += _mtp_extras(dims, layer)
    return specs


def _outside(dims: Dims) -> Iterator[Spec]:
    shape = (dims.vocab_size, dims.hidden_size)
    cut = Cut(dim=0, part_count=dims.vocab_size)
    yield Spec(name="model.embed_tokens.weight", shape=shape, role="table", cut=cut)
    yield Spec(name="model.norm.weight", shape=(dims.hidden_size,), role="norm")
    yield Spec(name="lm_head.weight", shape=shape, role="table", cut=cut, optional=dims.tied)


def _decoder_layer(dims: Dims, layer: int, *, sparse: bool, indexed: bool) -> Iterator[Spec]:
    prefix = f"model.layers.{layer}."
    hidden = (dims.hidden_size,)
    yield Spec(name=f"{prefix}input_layernorm.weight", shape=hidden, role="norm", layer=layer)
    yield from _attention(dims, layer, f"{prefix}self_attn.")
    if indexed:
        yield from _indexer(dims, layer, f"{prefix}self_attn.indexer.")
    post = f"{prefix}post_attention_layernorm.weight"
    yield Spec(name=post, shape=hidden, role="norm", layer=layer)
    if sparse:
        yield from _experts(dims, layer, f"{prefix}mlp.")
    else:
        yield from _mlp(dims, layer, f"{prefix}mlp.", width=dims.intermediate_size)


def _attention(dims: Dims, layer: int, prefix: str) -> Iterator[Spec]:
    heads = dims.num_attention_heads
    query_dim = dims.qk_nope_head_dim + dims.qk_rope_head_dim
    row_dim = dims.kv_lora_rank + dims.qk_rope_head_dim
    by_head = Cut(dim=0, part_count=heads)

    def linear(name: str, rows: int, columns: int, cut: Cut | None = None) -> Spec:
        name = f"{prefix}{name}.weight"
        return Spec(name=name, shape=(rows, columns), role="linear", cut=cut, layer=layer)

    def norm(name: str, width: int) -> Spec:
        return Spec(name=f"{prefix}{name}.weight", shape=(width,), role="norm", layer=layer)

    yield linear("q_a_proj", dims.q_lora_rank, dims.hidden_size)
    yield norm("q_a_layernorm", dims.q_lora_rank)
    yield linear("q_b_proj", heads * query_dim, dims.q_lora_rank, by_head)
    yield linear("kv_a_proj_with_mqa", row_dim, dims.hidden_size)
    yield norm("kv_a_layernorm", dims.kv_lora_rank)
    both_dims = dims.qk_nope_head_dim + dims.v_head_dim
    yield linear("kv_b_proj", heads * both_dims, dims.kv_lora_rank, by_head)
    out_cut = Cut(dim=1, part_count=heads)
    yield linear("o_proj", dims.hidden_size, heads * dims.v_head_dim, out_cut)


def _indexer(dims: Dims, layer: int, prefix: str) -> Iterator[Spec]:
    """Not cut by tensor parallelism: every rank must pick the same rows."""
    key_dim, heads = dims.index_head_dim, dims.index_n_heads
    for name, shape, role in (
        ("wq_b.weight", (heads * key_dim, dims.q_lora_rank), "linear"),
        ("wk.weight", (key_dim, dims.hidden_size), "linear"),
        ("k_norm.weight", (key_dim,), "norm"),
        ("k_norm.bias", (key_dim,), "norm"),
        ("weights_proj.weight", (heads, dims.hidden_size), "table"),
    ):
        full_name = prefix + name
        yield Spec(name=full_name, shape=shape, role=role, layer=layer)  # type: ignore[arg-type]


def _mlp(
    dims: Dims, layer: int, prefix: str, *, width: int, expert: int | None = None
) -> Iterator[Spec]:
    for name, shape, dim in (
        ("gate_proj", (width, dims.hidden_size), 0),
        ("up_proj", (width, dims.hidden_size), 0),
        ("down_proj", (dims.hidden_size, width), 1),
    ):
        yield Spec(
            name=f"{prefix}{name}.weight",
            shape=shape,
            role="linear",
            cut=Cut(dim=dim, part_count=width),
            layer=layer,
            expert=expert,
        )


def _experts(dims: Dims, layer: int, prefix: str) -> Iterator[Spec]:
    count, width = dims.n_routed_experts, dims.moe_intermediate_size
    gate = (count, dims.hidden_size)
    yield Spec(name=f"{prefix}gate.weight", shape=gate, role="table", layer=layer)
    bias = f"{prefix}gate.e_score_correction_bias"
    yield Spec(name=bias, shape=(count,), role="correction", layer=layer)
    for expert in range(count):
        yield from _mlp(dims, layer, f"{prefix}experts.{expert}.", width=width, expert=expert)
    if dims.n_shared_experts:
        shared_width = width * dims.n_shared_experts
        yield from _mlp(dims, layer, f"{prefix}shared_experts.", width=shared_width)


def _mtp_extras(dims: Dims, layer: int) -> Iterator[Spec]:
    prefix, hidden = f"model.layers.{layer}.", dims.hidden_size
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield Spec(name=f"{prefix}{name}.weight", shape=(hidden,), role="norm", layer=layer)
    joined = (hidden, 2 * hidden)
    yield Spec(name=f"{prefix}eh_proj.weight", shape=joined, role="table", layer=layer)
    for name in ("embed_tokens", "shared_head.head") if dims.model_type == "deepseek_v32" else ():
        yield Spec(
            name=f"{prefix}{name}.weight",
            shape=(dims.vocab_size, hidden),
            role="table",
            cut=Cut(dim=0, part_count=dims.vocab_size),
            layer=layer,
            optional=True,
        )
