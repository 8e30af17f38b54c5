"""Every tensor of a deepseek_v32 or glm_moe_dsa checkpoint, by its published name.

Facts only: name, shape, and which of three kinds of storage it has: `block` weights are fp8 with
scales in an fp8 checkpoint, `plain` ones stay bf16 there, `exact` ones are f32 in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ess.errors import BadInput

Storage = Literal["block", "plain", "exact"]
FAMILIES = ("deepseek_v32", "glm_moe_dsa")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored tensor."""

    name: str
    shape: tuple[int, ...]
    storage: Storage


def indexer_layers(config: dict[str, Any]) -> list[bool]:
    """Which layers own an indexer; the others reuse the selection of the last one that does."""
    count = config["num_hidden_layers"]
    kinds = config.get("indexer_types")
    if kinds is not None:
        return [kind == "full" for kind in kinds]
    pattern = config.get("index_topk_pattern")
    if pattern is not None:
        return [letter == "F" for letter in pattern]
    every = config.get("index_topk_freq", 1)
    offset = config.get("index_skip_topk_offset", 2)
    return [max(layer - offset + 1, 0) % every == 0 for layer in range(count)]


def _attention(config: dict[str, Any], prefix: str) -> Iterator[Tensor]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    query, latent = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    value = config["v_head_dim"]
    yield Tensor(f"{prefix}q_a_proj.weight", (query, hidden), "block")
    yield Tensor(f"{prefix}q_a_layernorm.weight", (query,), "exact")
    yield Tensor(f"{prefix}q_b_proj.weight", (heads * (nope + rope), query), "block")
    yield Tensor(f"{prefix}kv_a_proj_with_mqa.weight", (latent + rope, hidden), "block")
    yield Tensor(f"{prefix}kv_a_layernorm.weight", (latent,), "exact")
    yield Tensor(f"{prefix}kv_b_proj.weight", (heads * (nope + value), latent), "block")
    yield Tensor(f"{prefix}o_proj.weight", (hidden, heads * value), "block")


def _indexer(config: dict[str, Any], prefix: str) -> Iterator[Tensor]:
    heads, width = config["index_n_heads"], config["index_head_dim"]
    hidden = config["hidden_size"]
    yield Tensor(f"{prefix}wq_b.weight", (heads * width, config["q_lora_rank"]), "block")
    yield Tensor(f"{prefix}wk.weight", (width, hidden), "block")
    yield Tensor(f"{prefix}k_norm.weight", (width,), "exact")
    yield Tensor(f"{prefix}k_norm.bias", (width,), "exact")
    yield Tensor(f"{prefix}weights_proj.weight", (heads, hidden), "plain")


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[Tensor]:
    yield Tensor(f"{prefix}gate_proj.weight", (width, hidden), "block")
    yield Tensor(f"{prefix}up_proj.weight", (width, hidden), "block")
    yield Tensor(f"{prefix}down_proj.weight", (hidden, width), "block")


def _experts(config: dict[str, Any], prefix: str) -> Iterator[Tensor]:
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]
    count = config["n_routed_experts"]
    yield Tensor(f"{prefix}gate.weight", (count, hidden), "plain")
    yield Tensor(f"{prefix}gate.e_score_correction_bias", (count,), "exact")
    for expert in range(count):
        yield from _mlp(f"{prefix}experts.{expert}.", hidden, width)
    yield from _mlp(f"{prefix}shared_experts.", hidden, width * config["n_shared_experts"])


def _layer(config: dict[str, Any], layer: int, *, dense: bool, indexer: bool) -> Iterator[Tensor]:
    prefix, hidden = f"model.layers.{layer}.", config["hidden_size"]
    yield Tensor(f"{prefix}input_layernorm.weight", (hidden,), "exact")
    yield Tensor(f"{prefix}post_attention_layernorm.weight", (hidden,), "exact")
    yield from _attention(config, f"{prefix}self_attn.")
    if indexer:
        yield from _indexer(config, f"{prefix}self_attn.indexer.")
    if dense:
        yield from _mlp(f"{prefix}mlp.", hidden, config["intermediate_size"])
    else:
        yield from _experts(config, f"{prefix}mlp.")


def _mtp(config: dict[str, Any], layer: int) -> Iterator[Tensor]:
    prefix, hidden = f"model.layers.{layer}.", config["hidden_size"]
    yield from _layer(config, layer, dense=False, indexer=True)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield Tensor(f"{prefix}{norm}.weight", (hidden,), "exact")
    yield Tensor(f"{prefix}eh_proj.weight", (hidden, 2 * hidden), "plain")
    if config["model_type"] == "deepseek_v32":
        vocabulary = (config["vocab_size"], hidden)
        yield Tensor(f"{prefix}embed_tokens.weight", vocabulary, "plain")
        yield Tensor(f"{prefix}shared_head.head.weight", vocabulary, "plain")


def checkpoint_tensors(config: dict[str, Any]) -> list[Tensor]:
    """All tensors of the config, MTP layers included, scales not."""
    if config.get("model_type") not in FAMILIES:
        raise BadInput(f"model_type {config.get('model_type')!r} is not one of {FAMILIES}")
    count, hidden = config["num_hidden_layers"], config["hidden_size"]
    owners = indexer_layers(config)
    if len(owners) != count:
        raise BadInput(f"the indexer pattern names {len(owners)} layers, the model has {count}")
    vocabulary = (config["vocab_size"], hidden)
    tensors = [Tensor("model.embed_tokens.weight", vocabulary, "plain")]
    for layer in range(count):
        dense = layer < config["first_k_dense_replace"]
        tensors += _layer(config, layer, dense=dense, indexer=owners[layer])
    for layer in range(count, count + config.get("num_nextn_predict_layers", 0)):
        tensors += _mtp(config, layer)
    tensors.append(Tensor("model.norm.weight", (hidden,), "exact"))
    tensors.append(Tensor("lm_head.weight", vocabulary, "plain"))
    return tensors
