"""How many bytes a model on a device keeps of a checkpoint, from the files' headers alone.

What `ess.models` makes of each tensor: vectors, the gate and the heads' weights of the indexer are
float32; the up projection of keys and values is never in blocks, nor are grouped heads; matrices
that are multiplied as one stay in blocks where no block would hold rows of two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from ess.models.config import ModelConfig
from ess.models.weights.expected.shapes import (
    FREQUENCY_FACTORS,
    HEAD,
    Spec,
    expected_tensors,
    scale_shape,
)
from ess.models.weights.expected.verify import FP8
from ess.models.weights.files.header import DTYPE_BYTES, Entry, renamed
from ess.models.weights.stored import QUANT_BLOCK

F32_BYTES: Final = 4
BF16_BYTES: Final = 2
EMBEDDING: Final = "model.embed_tokens.weight"
COMPUTED: Final = {"bf16": BF16_BYTES, "f32": F32_BYTES}
IN_F32: Final = ("mlp.gate.weight", "indexer.weights_proj.weight")
UNREAD: Final = (".embed_tokens.weight", ".shared_head.head.weight")
"""Weights of the MTP layer that are not read: the layer uses those of the whole model."""

REORDERED: Final = ("q_b_proj", "kv_a_proj_with_mqa", "wq_b", "wk")
"""Products whose rows are put in our order, where a configuration `reorders`."""


def kept_bytes(
    config: ModelConfig,
    entries: Mapping[str, Entry],
    form: str,
    *,
    layers: range | None = None,
    rank_count: int = 1,
    redundant: int = 0,
) -> int:
    """`form` is what weights are computed in: bf16, f32, or as they are stored. With `layers` only
    a part of the model is counted, which consists of these main layers. Each rank has its share of
    the experts' places, of which there are `redundant` more than experts."""
    part = range(config.layer_count) if layers is None else layers
    entries = renamed(entries, config.words)
    specs = expected_tensors(config, mtp=config.mtp_layer_count > 0)
    kept = routed = 0
    for spec in specs:
        if spec.name in entries and _is_of(spec, part, config):
            size = _kept(spec, entries, config, form)
            kept, routed = kept + size, routed + (size if spec.expert is not None else 0)
    if rank_count > 1:
        places = (config.expert_count + redundant) // rank_count
        kept += routed * places // config.expert_count - routed
    more = _padding(config, entries, form, part)
    if part.stop == config.layer_count:
        more += _own_head(config, entries, form)
    rotaries = 1 + sum(layer in part for layer in config.window_layers)
    return kept + more + rotaries * (config.rope_dim // 2) * F32_BYTES


def _is_of(spec: Spec, part: range, config: ModelConfig) -> bool:
    """Whether a part of the model reads it; the last part has the MTP layer, and for it, or as a
    head, the embedding once more."""
    is_last = part.stop == config.layer_count
    if spec.name == EMBEDDING:
        return part.start == 0 or (is_last and (config.mtp_layer_count > 0 or config.tie_head))
    if spec.layer is None:
        return is_last or spec.name == FREQUENCY_FACTORS
    return spec.layer in part or (is_last and spec.layer >= config.layer_count)


def _kept(spec: Spec, entries: Mapping[str, Entry], config: ModelConfig, form: str) -> int:
    values = math.prod(spec.shape)
    if spec.name == FREQUENCY_FACTORS or (spec.layer is not None and spec.name.endswith(UNREAD)):
        return 0
    is_head = spec.name == HEAD and config.stream_count > 1
    if is_head or spec.role in ("norm", "correction") or spec.name.endswith(IN_F32):
        return values * F32_BYTES
    if form in COMPUTED:
        return values * COMPUTED[form]
    dtype = entries[spec.name].dtype
    if dtype != FP8:
        return values * DTYPE_BYTES[dtype]
    if not _stays_in_blocks(spec, config):
        return values * BF16_BYTES
    return values + math.prod(scale_shape(spec.shape)) * F32_BYTES


def _own_head(config: ModelConfig, entries: Mapping[str, Entry], form: str) -> int:
    """Bytes of a separate head: with several streams it is float32, so a copy if the embedding has
    another type."""
    if HEAD in entries or config.stream_count == 1:
        return 0
    size = COMPUTED.get(form) or DTYPE_BYTES[entries[EMBEDDING].dtype]
    return 0 if size == F32_BYTES else config.vocab_size * config.hidden_dim * F32_BYTES


def _padding(config: ModelConfig, entries: Mapping[str, Entry], form: str, part: range) -> int:
    """Bytes of padding for grouped heads: it fills keys and values up to a row's halves, and the
    rest."""
    if not config.is_grouped:
        return 0
    kept = config.key_head_count * config.value_dim
    rows = config.latent_dim - 2 * kept + config.rope_dim
    size = COMPUTED.get(form)
    if size is None:
        stored = entries["model.layers.0.self_attn.k_proj.weight"].dtype
        size = BF16_BYTES if stored == FP8 else DTYPE_BYTES[stored]
    return len(part) * rows * config.hidden_dim * size


def _stays_in_blocks(spec: Spec, config: ModelConfig) -> bool:
    *_, room, name, _ = spec.name.split(".")
    is_cut = name == "kv_b_proj" or (name == "q_b_proj" and config.value_gates == "query")
    is_moved = config.reorders and name in REORDERED
    if is_cut or is_moved or (room == "self_attn" and config.is_grouped):
        return False
    if name in ("q_a_proj", "kv_a_proj_with_mqa"):
        return config.query_rank % QUANT_BLOCK == 0
    if name in ("gate_proj", "up_proj"):
        return spec.shape[0] % QUANT_BLOCK == 0
    return True
