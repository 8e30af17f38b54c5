"""What must go together in a model's configuration, whichever file it was read from.

Errors name keys as files spell them. Needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ess.errors import BadInput
from ess.layout import SCALE_GROUP, IndexForm, RowForm
from ess.units import PAGE_ROWS

if TYPE_CHECKING:
    from ess.models.config import Compressed, ModelConfig

GROUPED_DIM: Final = 8  # 16 bytes of bfloat16, which grouped products step by
KEY_STEP: Final = 4  # an index key in fp8 is whole words


def check_sizes(config: ModelConfig) -> None:
    _check_attention(config)
    _check_experts(config)
    _check_layers(config)
    for end in (config.eos_ids,) if isinstance(config.eos_ids, int) else config.eos_ids:
        _require(
            0 <= end < config.vocab_size,
            f"eos_token_id {end} is outside of vocab_size {config.vocab_size}",
        )


def _check_attention(config: ModelConfig) -> None:
    _require(config.nope_dim > 0 or config.is_grouped, "qk_nope_head_dim is 0")
    _require(config.rope_dim % 2 == 0, f"qk_rope_head_dim {config.rope_dim} is odd")
    _require(
        config.rope_dim <= config.index_dim,
        f"qk_rope_head_dim {config.rope_dim} exceeds index_head_dim {config.index_dim}",
    )
    _require(
        config.index_dim % KEY_STEP == 0,
        f"index_head_dim {config.index_dim} is not a multiple of {KEY_STEP}",
    )


def _check_experts(config: ModelConfig) -> None:
    experts, groups = config.expert_count, config.expert_group_count
    kept = config.expert_groups_kept
    _require(
        experts % groups == 0,
        f"n_routed_experts {experts} is not a multiple of n_group {groups}",
    )
    for name, dim in (
        ("hidden_size", config.hidden_dim),
        ("moe_intermediate_size", config.expert_dim),
    ):
        _require(dim % GROUPED_DIM == 0, f"{name} {dim} is not a multiple of {GROUPED_DIM}")
    _require(kept <= groups, f"topk_group {kept} exceeds n_group {groups}")
    _require(
        groups == 1 or experts // groups >= 2,
        f"n_group {groups} leaves {experts // groups} of {experts} experts to a group: need 2",
    )
    _require(
        config.experts_per_token <= kept * (experts // groups),
        f"num_experts_per_tok {config.experts_per_token} exceeds the "
        f"{kept * (experts // groups)} experts of the kept groups",
    )


def _check_layers(config: ModelConfig) -> None:
    if config.window is not None:
        _require(
            config.window.size <= config.top_k,
            f"sliding_window {config.window.size} exceeds index_topk {config.top_k}",
        )
    if config.compressed is not None:
        return _check_compressed(config, config.compressed)
    indexers = "indexer_types (or index_topk_pattern)"
    for name, kinds in (
        ("mlp_layer_types", config.mlp_kinds),
        (indexers, config.indexer_kinds),
    ):
        _require(
            len(kinds) in (0, config.layer_count),
            f"{name} has {len(kinds)} entries for {config.layer_count} layers",
        )
    source = indexers if config.indexer_kinds else "index_topk_freq and index_skip_topk_offset"
    if config.recurrent_layers:
        return _check_recurrent(config, source)
    _require(config.has_indexer(0), f"layer 0 must have an indexer of its own: see {source}")


def _check_recurrent(config: ModelConfig, source: str) -> None:
    without = config.recurrent_layers
    _require(len(without) < config.layer_count, "layer_types has no layer with an indexer")
    for layer in range(config.layer_count):
        _require(
            config.starts_group(layer) or layer - 1 not in without,
            f"layer {layer} must have an indexer of its own, behind one without: see {source}",
        )


def _check_compressed(config: ModelConfig, compressed: Compressed) -> None:
    heads, groups = config.head_count, compressed.output_groups
    _require(
        heads * config.value_dim % groups == 0,
        f"o_groups {groups} does not divide {heads} heads of {config.value_dim}",
    )


def check_codecs(config: ModelConfig, row: RowForm, index: IndexForm) -> None:
    """Checks what these forms of rows and keys need and other forms do not."""
    ranks = {"kv_lora_rank": config.latent_dim}
    if config.window is not None:
        ranks["swa_kv_lora_rank"] = config.window.latent_dim
    for name, latent in ranks.items():
        _require_fits(
            config,
            row != "fp8" or latent % SCALE_GROUP == 0,
            f"{name} {latent} is not a multiple of {SCALE_GROUP}, which fp8 rows need:"
            " choose row bf16 or f32",
        )
        _require_fits(
            config,
            row != "bf16" or latent % 2 == 0,
            f"{name} {latent} is odd, but bf16 rows need it even: choose row f32",
        )
    key, unit = config.index_dim, config.select_unit
    _require_fits(config, PAGE_ROWS % unit == 0, f"index_kpool {unit} does not divide {PAGE_ROWS}")
    _require_fits(
        config,
        index != "fp8" or config.pooled is not None or key & (key - 1) == 0,
        f"index_head_dim {key} is not a power of two, which fp8 index keys need:"
        " they go through a Hadamard transform",
    )


def _require_fits(config: ModelConfig, is_met: bool, sentence: str) -> None:
    _require(is_met, f"config.json of {config.family}: {sentence}")


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise BadInput(sentence)
