"""The numbers of a config.json that decide tensor shapes, each within a bound.

Only what the shape formula needs is read here; what the model computes with it is elsewhere. The
bounds are far above any published model and far below what would exhaust memory when the tensor
names are listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ess.errors import BadInput

QUANT_BLOCK: Final = 128
TENSOR_COUNT_MAX: Final = 500_000
_FAMILIES: Final = ("deepseek_v32", "glm_moe_dsa")
_WIDTH: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """Sizes by their Hugging Face names, and per layer: routed experts? an indexer of its own?"""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    n_shared_experts: int
    sparse: tuple[bool, ...]
    indexed: tuple[bool, ...]
    mtp_count: int
    tied: bool
    fp8: bool

    @property
    def layer_count(self) -> int:
        return len(self.sparse)

    @property
    def layer_total(self) -> int:
        return self.layer_count + self.mtp_count


def read_dims(config: Mapping[str, Any], *, what: str = "config.json") -> Dims:
    """The dims of a Hugging Face configuration, or BadInput that names the key."""
    _refuse_foreign(config, what)
    number = _Numbers(config, what)
    layer_count = number("num_hidden_layers", 1, 1024)
    dims = Dims(
        model_type=_family(config, what),
        vocab_size=number("vocab_size", 1, 1 << 24),
        hidden_size=number("hidden_size", 1, _WIDTH),
        intermediate_size=number("intermediate_size", 1, _WIDTH),
        moe_intermediate_size=number("moe_intermediate_size", 1, _WIDTH),
        num_attention_heads=number("num_attention_heads", 1, 4096),
        q_lora_rank=number("q_lora_rank", 1, _WIDTH),
        kv_lora_rank=number("kv_lora_rank", 1, _WIDTH),
        qk_nope_head_dim=number("qk_nope_head_dim", 1, 4096),
        qk_rope_head_dim=number("qk_rope_head_dim", 0, 4096),
        v_head_dim=number("v_head_dim", 1, 4096),
        index_n_heads=number("index_n_heads", 1, 4096),
        index_head_dim=number("index_head_dim", 1, 4096),
        index_topk=number("index_topk", 1, 1 << 20, default=2048),
        n_routed_experts=number("n_routed_experts", 1, 4096),
        n_shared_experts=number("n_shared_experts", 0, 64, default=1),
        sparse=_sparse_layers(config, layer_count, number, what),
        indexed=_indexed_layers(config, layer_count, number, what),
        mtp_count=number("num_nextn_predict_layers", 0, 16, default=0),
        tied=bool(config.get("tie_word_embeddings", False)),
        fp8=_fp8(config, what),
    )
    tensor_count = (sum(dims.sparse) + dims.mtp_count) * dims.n_routed_experts * 3
    if tensor_count > TENSOR_COUNT_MAX:
        raise BadInput(
            f"{what} asks for {tensor_count:,} tensors; the bound is {TENSOR_COUNT_MAX:,}"
        )
    return dims


class _Numbers:
    """Whole numbers of a configuration by key, each within its bound."""

    def __init__(self, config: Mapping[str, Any], what: str) -> None:
        self._config = config
        self._what = what

    def __call__(self, key: str, low: int, high: int, *, default: int | None = None) -> int:
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not low <= value <= high:
            shown = "missing" if value is None else repr(value)[:80]
            raise BadInput(f"{self._what}: {key} is {shown}, expected a number in {low}..{high}")
        return value


def _refuse_foreign(config: Mapping[str, Any], what: str) -> None:
    if config.get("auto_map"):
        raise BadInput(
            f"{what} has auto_map, which runs code from the checkpoint: ESS never does."
            " Remove the key if the model is of a known type without that code"
        )
    if config.get("attention_bias"):
        raise BadInput(f"{what}: attention_bias is set, but the known families have no such bias")
    if config.get("moe_layer_freq", 1) != 1:
        raise BadInput(f"{what}: moe_layer_freq is {config['moe_layer_freq']!r}, only 1 is known")


def _family(config: Mapping[str, Any], what: str) -> str:
    model_type = config.get("model_type")
    if model_type not in _FAMILIES:
        raise BadInput(f"{what}: model_type {str(model_type)[:80]!r} is not among {_FAMILIES}")
    return str(model_type)


def _fp8(config: Mapping[str, Any], what: str) -> bool:
    """Does the configuration announce DeepSeek's fp8 blocks? Anything else packed is refused."""
    quantised = config.get("quantization_config")
    if quantised is None:
        return False
    if not isinstance(quantised, Mapping):
        raise BadInput(f"{what}: quantization_config is not an object")
    method = quantised.get("quant_method")
    if method != "fp8":
        raise BadInput(
            f"{what}: quantization_config.quant_method is {str(method)[:80]!r};"
            " ESS reads DeepSeek's fp8 blocks ('fp8') and plain bf16, f16 or f32"
        )
    if quantised.get("fmt", "e4m3") != "e4m3":
        raise BadInput(f"{what}: quantization_config.fmt is {quantised['fmt']!r}, expected 'e4m3'")
    blocks = quantised.get("weight_block_size", [QUANT_BLOCK, QUANT_BLOCK])
    if blocks != [QUANT_BLOCK, QUANT_BLOCK]:
        raise BadInput(f"{what}: weight_block_size is {str(blocks)[:80]}, expected [128, 128]")
    return True


def _sparse_layers(
    config: Mapping[str, Any], layer_count: int, number: _Numbers, what: str
) -> tuple[bool, ...]:
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        dense_count = number("first_k_dense_replace", 0, layer_count)
        return tuple(layer >= dense_count for layer in range(layer_count))
    return _flags(kinds, layer_count, {"sparse": True, "dense": False}, f"{what}: mlp_layer_types")


def _indexed_layers(
    config: Mapping[str, Any], layer_count: int, number: _Numbers, what: str
) -> tuple[bool, ...]:
    """Which layers own an indexer; the others reuse the selection of the last one that does."""
    words = {"full": True, "shared": False, "F": True, "S": False}
    for key in ("indexer_types", "index_topk_pattern"):
        if config.get(key) is not None:
            found = _flags(config[key], layer_count, words, f"{what}: {key}")
            break
    else:
        freq = number("index_topk_freq", 1, layer_count, default=1)
        offset = number("index_skip_topk_offset", 0, layer_count, default=2)
        found = tuple(max(i - offset + 1, 0) % freq == 0 for i in range(layer_count))
    if not found[0]:
        raise BadInput(f"{what}: layer 0 shares an indexer, but there is none before it")
    return found


def _flags(value: Any, count: int, words: Mapping[str, bool], what: str) -> tuple[bool, ...]:
    if not isinstance(value, str | list | tuple) or len(value) != count:
        raise BadInput(f"{what} is not a list of {count} entries, one per layer")
    strange = [item for item in value if not isinstance(item, str) or item not in words]
    if strange:
        raise BadInput(f"{what} holds {str(strange[0])[:80]!r}, expected one of {sorted(words)}")
    return tuple(words[item] for item in value)
