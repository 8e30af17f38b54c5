"""dots3, its text: layers with an indexer beside layers that attend to a window of the last tokens.

The two kinds have heads, ranks and rotary frequencies of their own. A window is served as a
selection that no indexer makes: its rows are offloaded, shared, preempted and sent as all others
are. Images, sound and the MTP module are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Unpack

from ess.errors import BadInput
from ess.models.config import ModelConfig
from ess.models.config_json.reading import named, parse, said_kinds
from ess.models.part import ModelPart, require_all_heads

if TYPE_CHECKING:
    from ess.models.layers import TensorSource
    from ess.models.model import Model


DEFAULTS: Final = {
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 524288,
    "first_k_dense_replace": 1,
    "rope_theta": 80_000_000.0,
}
FIXED: Final = {
    "indexer_rope_interleave": True,
    "use_dsa": True,
    "use_sliding_window": True,
}
OWN: Final = {"value_gates": "head", "rope_keys_normed": True}
UNREAD: Final = ("vision_encoder.", "audio_encoder.", "audio_adapter.", "model.mtp.", "mtp.")
WINDOW: Final = {
    "sliding_window": 512,
    "swa_num_attention_heads": 64,
    "swa_q_lora_rank": 1024,
    "swa_kv_lora_rank": 1024,
    "swa_qk_nope_head_dim": 192,
    "swa_v_head_dim": 128,
    "swa_rope_theta": 50_000.0,
}
SHARED: Final = ("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size")
SHARED_DIM: Final = 1536
FOREIGN: Final = (
    *("num_nextn_predict_layers", "index_share_for_mtp_iteration", "indexer_types"),
    *("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern", "layer_types"),
)
KINDS: Final = {
    "full_attention": False,
    "indexed_attention": False,
    "sliding_attention": True,
}
USUAL: Final = ("full_attention", "sliding_attention")
SAME: Final = (
    ("swa_qk_rope_head_dim", "qk_rope_head_dim"),
    ("swa_num_key_value_heads", "swa_num_attention_heads"),
)


def read(raw: Mapping[str, Any]) -> ModelConfig:
    fields = {key: value for key, value in raw.items() if value is not None}
    with named(raw):
        for key in ("rope_parameters", "rope_scaling"):
            if key in fields:
                raise BadInput(f"{key} is not supported, only rope_theta and swa_rope_theta")
        layers = said_kinds(fields, KINDS, lambda n: USUAL[n > 1 and n % 4 != 1])
        window = _window(fields)
    shared = next((fields[key] for key in SHARED if key in fields), SHARED_DIM)
    own = {
        **OWN,
        SHARED[0]: shared,
        "window_layers": layers,
        "window": window,
        "unread_prefixes": (*UNREAD, f"model.layers.{fields.get('num_hidden_layers')}."),
    }
    given = {key: value for key, value in fields.items() if key not in FOREIGN}
    return parse(given, defaults=DEFAULTS, fixed=FIXED, own=own)


def _window(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Where sizes of one kind must be those of the other, they are checked."""
    fields = {
        "sliding_window": fields.get("sliding_window_size", WINDOW["sliding_window"]),
        **fields,
    }
    window = {key: fields.get(key, usual) for key, usual in WINDOW.items()}
    whole = {**fields, **window}
    for key, other in SAME:
        if key in fields and fields[key] != whole.get(other):
            raise BadInput(
                f"{key} {fields[key]!r:.40} differs from {other} {whole.get(other)!r:.40}"
            )
    return window


def build(config: ModelConfig, tensor: TensorSource, **part: Unpack[ModelPart]) -> Model:
    from ess.models.families.layers.windows import WindowLayer
    from ess.models.model import Model

    require_all_heads(config, part)
    return Model(config, tensor, **part, layer=WindowLayer)
