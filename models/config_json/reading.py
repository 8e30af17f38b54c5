"""From config.json to a `ModelConfig`: nothing is left out that changes what the model computes.

A key is read into a field, or is checked here to say what ESS computes anyway, or changes nothing
in transformers either. What transformers would compute differently is refused by the key's name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

import msgspec

from ess.errors import BadInput
from ess.models.config import LAYERS_MAX, FileConfig, ModelConfig
from ess.models.config_json.rope import read_rope

FIXED: Final[Mapping[str, object]] = MappingProxyType(
    {
        "hidden_act": "silu",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_interleave": True,
        "partial_rotary_factor": 1,
        "is_causal": True,
        "is_encoder_decoder": False,
    }
)
# transformers takes the first for the second, or fails where they differ.
EQUAL: Final[Mapping[str, str]] = MappingProxyType(
    {
        "num_key_value_heads": "num_attention_heads",
        "num_experts": "n_routed_experts",
        "num_local_experts": "n_routed_experts",
    }
)
FOREIGN: Final = ("per_layer_config", "kv_sharing_modes", "transformers_weights")
_NAMES: Final = [
    {each.encode_name for each in msgspec.structs.fields(kind)}
    for kind in (FileConfig, ModelConfig)
]
# Fields that a file can say in the families alone that read them.
UNSAID: Final = frozenset(_NAMES[1] - _NAMES[0])
INDEXED: Final = ("indexed_attention", "deepseek_sparse_attention")


def parse(
    raw: Mapping[str, Any],
    *,
    defaults: Mapping[str, Any],
    fixed: Mapping[str, Any],
    own: Mapping[str, Any] = MappingProxyType({}),
    made_of: Mapping[str, str] = MappingProxyType({}),
) -> ModelConfig:
    """`raw` is config.json as a dict. Nulls count as absent, and for what is absent `defaults` are
    the family's, as they are in transformers. `fixed` keys can say nothing else. `own` are fields
    that the family says, or reads for itself: in other families such a key means nothing. `made_of`
    names the key behind a field that the family fills from one of another name."""
    present = {key: value for key, value in raw.items() if value is not None and key not in UNSAID}
    given = {**defaults, **fixed, **present}
    try:
        _check_keys(given, {**FIXED, **fixed})
        given["rope_parameters"] = read_rope(given)
        if (pattern := given.get("index_topk_pattern")) is not None:
            given.setdefault("indexer_types", _indexer_kinds(pattern))
        config = msgspec.convert({**given, **own}, ModelConfig)
        if config.rope_dim == 0 and config.pooled is None:
            raise BadInput("qk_rope_head_dim is 0")
        return config
    except (BadInput, msgspec.ValidationError) as error:
        sentence = (
            f"config.json of {raw.get('model_type')}: {error}{_offender({**given, **own}, error)}"
        )
        for ours, theirs in made_of.items():
            sentence = re.sub(rf"(?<!\w){re.escape(ours)}\b", theirs, sentence)
        raise BadInput(sentence) from None


@contextmanager
def named(raw: Mapping[str, Any]) -> Iterator[None]:
    """What is refused in here is refused as a config.json of this model."""
    try:
        yield
    except BadInput as error:
        raise BadInput(f"config.json of {raw.get('model_type')}: {error}") from None


def text_of(
    text: object, raw: Mapping[str, Any], *, nullable: Collection[str] = ()
) -> dict[str, Any]:
    """What `raw` says of its text, under the name of the whole model. Nulls count as absent, but
    for the `nullable` keys, where a null says something."""
    if not isinstance(text, Mapping):
        raise BadInput(f"text_config is {text!r:.60}, expected an object")
    of_all = {key: raw[key] for key in ("model_type", "tie_word_embeddings") if key in raw}
    given = {**text, **of_all}
    return {key: value for key, value in given.items() if value is not None or key in nullable}


def said_layers(given: Mapping[str, Any]) -> range:
    """The layers that a file says; none, where it says what `parse` refuses."""
    count = given.get("num_hidden_layers")
    return range(count if isinstance(count, int) and 0 < count <= LAYERS_MAX else 0)


def said_kinds(
    given: Mapping[str, Any], kinds: Mapping[str, bool], usual: Callable[[int], str]
) -> tuple[int, ...]:
    """The layers whose kind in `layer_types` counts; without the list each has its usual one."""
    layers = said_layers(given)
    listed = given.get("layer_types", [usual(n) for n in layers])
    if not layers:
        return ()
    if not isinstance(listed, list) or not all(kind in [*kinds] for kind in listed):
        raise BadInput(f"layer_types is {listed!r:.60}, expected {[*kinds]} for each layer")
    if len(listed) != len(layers):
        raise BadInput(f"layer_types has {len(listed)} entries for num_hidden_layers {len(layers)}")
    return tuple(n for n, kind in enumerate(listed) if kinds[kind])


def _check_keys(given: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    if given.get("auto_map"):
        raise BadInput(
            "auto_map runs code from the checkpoint: ESS never does."
            " Remove the key if the model is of a known type without that code"
        )
    for key, only in fixed.items():
        if not _is_same(given.get(key, only), only):
            raise BadInput(f"{key} {_shown(given[key])} is not supported, only {_shown(only)}")
    for key, other in EQUAL.items():
        if key in given and not _is_same(given[key], given.get(other)):
            sentence = f"{key} {_shown(given[key])} differs from {other} {_shown(given.get(other))}"
            raise BadInput(sentence)
    for key in FOREIGN:
        if given.get(key):
            raise BadInput(f"{key} {_shown(given[key])} is not supported")
    if "layer_types" in given:
        _check_layer_types(given["layer_types"], given.get("num_hidden_layers"))


def _check_layer_types(kinds: object, count: object) -> None:
    if not isinstance(kinds, list | tuple) or any(kind not in INDEXED for kind in kinds):
        raise BadInput(f"layer_types {_shown(kinds)} is not supported, only {INDEXED[0]!r} ones")
    if len(kinds) != count:
        raise BadInput(f"layer_types has {len(kinds)} entries for {count} layers")


def _is_same(value: object, only: object) -> bool:
    """True is not 1."""
    return value == only and isinstance(value, bool) == isinstance(only, bool)


def _shown(value: object) -> str:
    """A value as the file writes it."""
    try:
        return json.dumps(value)[:60]
    except (TypeError, ValueError):
        return f"{value!r:.60}"


def _indexer_kinds(pattern: object) -> list[object]:
    """A string of F and S, or a list in the words of indexer_types."""
    letters = {"F": "full", "S": "shared"}
    if not isinstance(pattern, str | list):
        raise BadInput(f"index_topk_pattern is {_shown(pattern)}, expected letters or a list")
    kinds = [letters.get(x, x) for x in pattern] if isinstance(pattern, str) else pattern
    for kind in kinds:
        if kind not in letters.values():
            raise BadInput(f"index_topk_pattern has {kind!r:.40}, expected F and S")
    return kinds


def _offender(given: Mapping[str, Any], error: Exception) -> str:
    path = re.search(r"`\$\.(\w+)(?:\.(\w+))?", str(error))
    if path is None:
        return ""
    value = given.get(path[1])
    if path[2] is not None and isinstance(value, Mapping):
        value = value.get(path[2])
    return f", got {value!r:.60}"
