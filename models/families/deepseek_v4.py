"""DeepSeek-V4: attention to entries of several tokens beside a window of the last ones.

Three kinds of layers: the last tokens alone; and entries of 4 tokens that an indexer chooses (CSA);
and all entries of 128 tokens (HCA). What they compute is in `ess.models.compressed`. The MTP module
is a layer of the first kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar, Unpack

from ess.errors import BadInput
from ess.models.config import ModelConfig
from ess.models.config_json.reading import named, parse, said_layers
from ess.models.config_json.rope import read_rope

if TYPE_CHECKING:
    from ess.models.layers import TensorSource
    from ess.models.model import Model
    from ess.models.part import ModelPart


DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "rms_norm_eps": 1e-6,
        "routed_scaling_factor": 1.5,
        "max_position_embeddings": 1048576,
        "head_dim": 512,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "sliding_window": 128,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "swiglu_limit": 10.0,
    }
)
FIXED: Final = {
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "indexer_rope_interleave": True,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
# Keys of config.json that this module reads, and that mean nothing to code that families share.
FOREIGN: Final = (
    *("layer_types", "mlp_layer_types", "indexer_types", "index_topk_freq", "index_topk_pattern"),
    *("num_key_value_heads", "partial_rotary_factor", "rope_scaling", "intermediate_size"),
    *("index_skip_topk_offset", "index_share_for_mtp_iteration"),
)
T = TypeVar("T")
WINDOW, SPARSE, HEAVY = "window", "sparse", "heavy"
KINDS: Final = {
    "sliding_attention": WINDOW,
    "compressed_sparse_attention": SPARSE,
    "heavily_compressed_attention": HEAVY,
}
RATIOS: Final = {0: WINDOW, 4: SPARSE, 128: HEAVY}
ROUTINGS: Final = {"hash_moe": True, "moe": False}
HASHED: Final = 3
MODULES: Final = "num_nextn_predict_layers"
COPIES: Final = ("mtp.0.emb.", "mtp.0.head.")
"""Some files repeat the model's embedding and head in the module."""
PUBLISHED: Final = (
    *(("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")),
    ("gate.bias", "gate.e_score_correction_bias"),
)
# As transformers saves what it has read.
SAVED: Final = (
    *(("model.layers", "layers"), ("model.embed_tokens", "embed"), ("model.norm", "norm")),
    *((f"model.hc_head.hc_{part}", f"hc_head_{part}") for part in ("fn", "base", "scale")),
    ("attn.norm", "attn.kv_norm"),
)


def read(raw: Mapping[str, Any]) -> ModelConfig:
    fields = {**DEFAULTS, **{key: value for key, value in raw.items() if value is not None}}
    with named(raw):
        rope_dim = _rope_dim(fields)
        compress, window = _ropes(fields, rope_dim)
        compressed = _compressed(fields) | {"window_rope": window}
        module_count = _module_count(fields)
    shared = {
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": fields["head_dim"] - rope_dim,
        "kv_lora_rank": fields["head_dim"] - rope_dim,
        "v_head_dim": fields["head_dim"],
        "intermediate_size": fields.get("moe_intermediate_size"),
        "rope_parameters": compress,
        MODULES: module_count,
    }
    own = {
        **{key: fields[key] for key in ("hc_mult", "hc_eps", "swiglu_limit")},
        "compressed": compressed,
        "expert_scores": "sqrtsoftplus",
        "has_sinks": True,
        "unread_prefixes": COPIES if module_count else ("mtp.",),
        "words": (*PUBLISHED, *SAVED),
    }
    given = {key: value for key, value in fields.items() if key not in FOREIGN} | shared
    return parse(given, defaults={}, fixed=FIXED, own=own, made_of=_made_of(fields))


def _made_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """The keys behind fields that are filled here."""
    return {
        "rope_parameters.rope_theta": "compress_rope_theta",
        "rope_parameters": "rope_scaling" if fields.get("rope_scaling") else "rope_parameters",
        "intermediate_size": "moe_intermediate_size",
        "compressed.sparse_rate": _rate_name(fields, "compress_rate_csa", SPARSE),
        "compressed.heavy_rate": _rate_name(fields, "compress_rate_hca", HEAVY),
    }


def _rate_name(fields: Mapping[str, Any], name: str, kind: str) -> str:
    [word] = (word for word, each in KINDS.items() if each == kind)
    return name if name in fields else f"compress_rates.{word}"


def _rope_dim(fields: Mapping[str, Any]) -> int:
    """How many of a head's last dimensions are rotated, given as a count or as a share."""
    head, count = fields["head_dim"], fields.get("qk_rope_head_dim")
    share = fields.get("partial_rotary_factor")
    if not _is_count(head):
        raise BadInput(f"head_dim is {head!r:.40}, expected a positive whole number")
    if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
        raise BadInput(f"partial_rotary_factor is {share!r:.40}, expected a share of head_dim")
    by_share = int(head * share) if share is not None else head // 8
    dim = by_share if count is None else count
    if share is not None and count is not None and count != by_share:
        raise BadInput(
            f"partial_rotary_factor {share!r:.40} of head_dim {head} is not"
            f" qk_rope_head_dim {count!r:.40}"
        )
    if not _is_count(dim) or dim >= head:
        name = "qk_rope_head_dim" if count is not None else "partial_rotary_factor"
        raise BadInput(f"{name} {fields.get(name)!r:.40} does not fit head_dim {head}")
    return int(dim)


def _ropes(fields: Mapping[str, Any], rope_dim: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rope of layers with entries, and of the others. A single object is yarn's, for the first
    kind alone."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    given = fields.get(name, {})
    if not isinstance(given, Mapping):
        raise BadInput(f"{name} is {given!r:.80}, expected an object")
    parts = given.get("compress"), given.get("main")
    if all(isinstance(part, Mapping) for part in parts):
        ropes = [_part(dict(part or {}), fields, rope_dim) for part in parts]
        return ropes[0], read_rope({**_lengths(fields), "rope_parameters": ropes[1]})
    compress = {key: value for key, value in given.items() if key not in ("compress", "main")}
    if compress.get("rope_theta", fields["rope_theta"]) != fields["rope_theta"]:
        raise BadInput(f"rope_theta of {name} differs from rope_theta {fields['rope_theta']!r:.40}")
    compress.setdefault("partial_rotary_factor", rope_dim / fields["head_dim"])
    compress = _part(compress, fields, rope_dim)
    compress["rope_theta"] = fields["compress_rope_theta"]
    if compress.get("rope_type", compress.get("type")) == "yarn":
        compress.setdefault("attention_factor", 1.0)
    return compress, {"rope_theta": fields["rope_theta"]}


def _part(rope: dict[str, Any], fields: Mapping[str, Any], rope_dim: int) -> dict[str, Any]:
    share = rope.pop("partial_rotary_factor", 1)
    if not isinstance(share, int | float) or int(fields["head_dim"] * share) != rope_dim:
        raise BadInput(f"partial_rotary_factor {share!r:.40} does not make {rope_dim} dimensions")
    return rope


def _lengths(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"max_position_embeddings": fields["max_position_embeddings"]}


def _compressed(fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields.get("num_key_value_heads", 1) != 1:
        raise BadInput(f"num_key_value_heads {fields['num_key_value_heads']!r:.40} is not 1")
    if fields["sliding_window"] == 1:
        raise BadInput("sliding_window 1 is not supported, only windows of several tokens")
    rates = fields.get("compress_rates", {})
    if not isinstance(rates, Mapping):
        raise BadInput(f"compress_rates is {rates!r:.60}, expected an object")
    sparse, heavy = list(KINDS)[1:]
    stored = fields.get("quantization_config")
    inside = stored.get("expert_dtype") if isinstance(stored, Mapping) else None
    copied = ("sliding_window", "o_groups", "o_lora_rank", "hc_sinkhorn_iters")
    return {
        **{key: fields[key] for key in copied},
        "kinds": (*_kinds(fields), WINDOW),
        "sparse_rate": fields.get("compress_rate_csa", rates.get(sparse, 4)),
        "heavy_rate": fields.get("compress_rate_hca", rates.get(heavy, 128)),
        "hashed": (*_hashed(fields), False),
        "expert_dtype": inside or fields.get("expert_dtype") or "bfloat16",
    }


def _kinds(fields: Mapping[str, Any]) -> tuple[str, ...]:
    layers = said_layers(fields)
    usual = ["heavy" if n < 2 or n % 2 == 0 else "sparse" for n in layers]
    both = [
        _listed(fields, name, words, len(layers))
        for name, words in (("layer_types", KINDS), ("compress_ratios", RATIOS))
        if name in fields
    ]
    if len(both) == 2 and both[0] != both[1]:
        raise BadInput("layer_types and compress_ratios say different layers")
    return (both or [tuple(usual)])[0]


def _module_count(fields: Mapping[str, Any]) -> Any:
    """One MTP module is read. Several modules, or those of DSpark, draft in ways that are not
    computed here: such a model is served without drafts."""
    count = fields.get(MODULES, 0)
    if fields.get("dspark_block_size") or (_is_count(count) and count > 1):
        return 0
    ratios, whole = fields.get("compress_ratios"), len(said_layers(fields)) + 1
    if count and isinstance(ratios, list) and len(ratios) == whole and ratios[-1] != 0:
        raise BadInput(
            f"compress_ratios has {ratios[-1]!r:.40} for the MTP module, which has no entries here:"
            f" with {MODULES} 0 the model is served without drafts"
        )
    return count


def _hashed(fields: Mapping[str, Any]) -> tuple[bool, ...]:
    count = len(said_layers(fields))
    if "mlp_layer_types" in fields:
        return _listed(fields, "mlp_layer_types", ROUTINGS, count)
    hashed = fields.get("num_hash_layers", HASHED)
    if not _is_count(hashed) and hashed != 0:
        raise BadInput(f"num_hash_layers is {hashed!r:.40}, expected a count of layers")
    return tuple(n < hashed for n in range(count))


def _listed(
    fields: Mapping[str, Any], name: str, words: Mapping[Any, T], count: int
) -> tuple[T, ...]:
    """What is behind the layers of the model is of its MTP module (`_module_count`)."""
    listed, known = fields[name], list(words)
    if not isinstance(listed, list) or len(listed) < count:
        raise BadInput(f"{name} is {listed!r:.60}, expected one of {known} for each layer")
    for word in listed[:count]:
        if isinstance(word, bool) or word not in known:
            raise BadInput(f"{name} has {word!r:.40}, expected one of {known}")
    return tuple(words[word] for word in listed[:count])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 1 << 24


def build(config: ModelConfig, tensor: TensorSource, **part: Unpack[ModelPart]) -> Model:
    from ess.models.compressed.model import CompressedModel

    is_whole = part.get("layers") is None and part.get("tp", 1) == 1
    if not is_whole or part.get("expert_ranks") is not None:
        raise BadInput(f"{config.family}: its layers, heads and experts are not divided yet")
    return CompressedModel(config, tensor)
