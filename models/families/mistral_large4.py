"""Mistral-Large-4, its text: queries of the layer's input, which grow with the logarithm of their
position; every fourth layer turns nothing; one factor for each rotary frequency is learned.

A checkpoint has Mistral's own names. Its pictures are not read, nor is its MTP module: its
computation is not published. A row of a layer that turns nothing has zeros in the place of its
rotary part, so that all layers have rows of one size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Unpack

from ess.errors import BadInput
from ess.models.config import ModelConfig
from ess.models.config_json.reading import named, parse, said_layers, text_of
from ess.models.part import ModelPart, require_all_heads

if TYPE_CHECKING:
    from ess.models.layers import TensorSource
    from ess.models.model import Model


DEFAULTS: Final = {
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2048.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.0,
    },
}
FIXED: Final = {
    "indexer_rope_interleave": True,
    "norm_topk_prob": True,
    "q_lora_rank": None,
    "scoring_func": "softmax",
}
OWN: Final = {
    "has_query_rank": False,
    "queries_grow": True,
    "frequencies_learned": True,
    "expert_scores": "softmax",
    "unread_prefixes": (
        *("vision_encoder.", "vision_language_adapter.", "patch_merger."),
        *("pre_mm_projector_norm.", "mtp_dspark."),
    ),
    "words": (
        ("layers", "model.layers"),
        ("tok_embeddings", "model.embed_tokens"),
        ("norm", "model.norm"),
        ("output", "lm_head"),
        ("lerope", "model.rotary_emb"),
        ("attention_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"),
        ("attention", "self_attn"),
        ("wq", "q_proj"),
        ("wkv_a_with_mqa", "kv_a_proj_with_mqa"),
        ("kv_a_norm", "kv_a_layernorm"),
        ("wkv_b", "kv_b_proj"),
        ("wo", "o_proj"),
        ("ssmax_scaling.s", "softmax_scaling.scale"),
        ("ssmax_scaling.b", "softmax_scaling.bias"),
        ("gate", "mlp.gate"),
        ("experts", "mlp.experts"),
        ("shared_experts", "mlp.shared_experts"),
        ("feed_forward", "mlp"),
        ("w1", "gate_proj"),
        ("w2", "down_proj"),
        ("w3", "up_proj"),
    ),
}
LOGIT_CAP: Final = 30.0
STILL_EVERY: Final = 4


def read(raw: Mapping[str, Any]) -> ModelConfig:
    with named(raw):
        given = text_of(raw.get("text_config"), raw)
        layers = said_layers(given)
        own = {
            **OWN,
            "q_lora_rank": given.get("hidden_size"),
            "final_logit_softcapping": given.get("final_logit_softcapping", LOGIT_CAP),
            "still_layers": _still_layers(given, layers),
        }
        if given.get("kv_source_layers", own_rows := [*layers]) != own_rows:
            raise BadInput("kv_source_layers lets layers share rows, which is not supported")
    made_of = {} if "q_lora_rank" in given else {"q_lora_rank": "hidden_size"}
    return parse(given, defaults=DEFAULTS, fixed=FIXED, own=own, made_of=made_of)


def _still_layers(given: Mapping[str, Any], layers: range) -> tuple[int, ...]:
    every = given.get("no_rope_layer_interval", STILL_EVERY)
    if not isinstance(every, int) or every < 1:
        raise BadInput(f"no_rope_layer_interval is {every!r:.60}, expected a count of layers")
    turns = given.get("no_rope_layers", [int((n + 1) % every != 0) for n in layers])
    fits = isinstance(turns, list) and len(turns) >= len(layers)
    if not fits or not all(turn in (0, 1) for turn in turns):
        raise BadInput(f"no_rope_layers is {turns!r:.60}, expected 0 or 1 for each layer")
    return tuple(n for n in layers if not turns[n])


def build(config: ModelConfig, tensor: TensorSource, **part: Unpack[ModelPart]) -> Model:
    from ess.models.families.layers.grown import GrownLayer
    from ess.models.model import Model

    require_all_heads(config, part)
    return Model(config, tensor, **part, layer=GrownLayer)
