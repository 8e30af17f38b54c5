"""GLM-5-next, its text: indexers choose neighbouring tokens together, nothing is rotated,
residual streams are mixed around each block; three of four layers are linear attention (KDA).

Requests keep a state beside their rows (`ess.models.config_json.linear`). Images and the MTP module
are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Unpack

from ess.errors import BadInput
from ess.models.config import ModelConfig
from ess.models.config_json.reading import INDEXED, named, parse, said_kinds, text_of
from ess.models.part import ModelPart, require_all_heads

if TYPE_CHECKING:
    from ess.models.layers import TensorSource
    from ess.models.model import Model


DEFAULTS: Final = {
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
    "qk_rope_head_dim": 0,
}
FIXED: Final = {
    "indexer_rope_interleave": True,
    "qk_rope_head_dim": 0,
    "index_kpool_always_select_tail": True,
    "index_kpool_compress": True,
    "rope_parameters": {},
}
STREAMS: Final = {"hc_mult": 4, "hc_eps": 1e-6, "swiglu_limit": 10.0}
POOLED: Final = {"index_kpool": 16, "hc_sinkhorn_iters": 20}
RECURRENT: Final = {
    "linear_num_heads": 64,
    "linear_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "linear_lower_bound": -5.0,
}
# A null says that there is no bound.
NULLABLE: Final = ("linear_lower_bound",)
# As older files say the same.
NESTED: Final = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}
USUAL: Final = ("linear_attention", "indexed_attention")
KINDS: Final = {USUAL[0]: True, "full_attention": False, **dict.fromkeys(INDEXED, False)}
FOREIGN: Final = (
    *("layer_types", "num_nextn_predict_layers", "first_k_dense_replace", "rope_theta"),
    *("rope_parameters", "rope_scaling", "index_share_for_mtp_iteration", "head_dim"),
)
WORDS: Final = (("model.language_model", "model"),)
UNREAD: Final = ("model.visual.", "visual.", "model.vision_tower.")


def read(raw: Mapping[str, Any]) -> ModelConfig:
    with named(raw):
        known = text_of(raw.get("text_config", raw), raw, nullable=NULLABLE)
        layers = said_kinds(known, KINDS, lambda n: USUAL[n % 4 == 3])
        own = {
            **{key: known.get(key, usual) for key, usual in STREAMS.items()},
            "pooled": {key: known.get(key, usual) for key, usual in POOLED.items()},
            "recurrent": _recurrent(known),
            "recurrent_layers": layers,
            "index_topk": _rows_chosen(known),
            "unread_prefixes": (*UNREAD, f"model.layers.{known.get('num_hidden_layers')}."),
            "words": WORDS,
        }
    given = {key: value for key, value in known.items() if key not in FOREIGN}
    return parse(given, defaults=DEFAULTS, fixed=FIXED, own=own)


def _recurrent(known: Mapping[str, Any]) -> dict[str, Any]:
    nested = known.get("linear_attn_config", {})
    if not isinstance(nested, Mapping):
        raise BadInput(f"linear_attn_config is {nested!r:.60}, expected an object")
    inside = {ours: nested[key] for key, ours in NESTED.items() if key in nested}
    fields = {key: {**known, **inside}.get(key, usual) for key, usual in RECURRENT.items()}
    if nested.get("safe_gate", bool(nested)) and fields["linear_lower_bound"] is None:
        fields["linear_lower_bound"] = RECURRENT["linear_lower_bound"]
    return fields


def _rows_chosen(known: Mapping[str, Any]) -> object:
    """Rows of the chosen units, and the most rows behind the last whole unit."""
    rows, unit = known.get("index_topk"), known.get("index_kpool", POOLED["index_kpool"])
    for count in (rows, unit):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            return rows
    assert isinstance(rows, int), "a count"
    if unit == 1:
        raise BadInput("index_kpool 1 is not supported, only units of several tokens")
    if rows % unit:
        raise BadInput(f"index_topk {rows} is not a multiple of index_kpool {unit}")
    return rows + unit - 1


def build(config: ModelConfig, tensor: TensorSource, **part: Unpack[ModelPart]) -> Model:
    from ess.models.families.layers.delta import layer_of
    from ess.models.families.layers.pooled import MixedModel

    require_all_heads(config, part)
    return MixedModel(config, tensor, **part, layer=layer_of)
