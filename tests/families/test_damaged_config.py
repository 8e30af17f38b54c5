"""A damaged configuration is refused in one sentence that names the key, in every family.

Every key that a tiny configuration says, or that its family may read, is left out and given values
of wrong types and absurd numbers. Each is refused by name, or the key is not read: then the
configuration is what it was. Values that a key may have are listed.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest

from ess.errors import BadInput
from ess.models.config import FileConfig, ModelConfig
from ess.models.config_json import reading
from ess.models.registry import MODULES, read_config
from ess.models.weights.expected.shapes import expected_tensors
from tests.compressed.world import LISTED, RATIOS
from tests.support import checkpoints

TINY: Final[dict[str, dict[str, Any]]] = {
    "deepseek_v32": checkpoints.TINY_V32,
    "glm_moe_dsa": checkpoints.TINY_GLM,
    "axk2": checkpoints.TINY_AXK2,
    "hy_v4": checkpoints.TINY_HY4,
    "mistral_large4": checkpoints.TINY_MISTRAL4,
    "dots3_note_text": checkpoints.TINY_DOTS3,
    "glm5_next": checkpoints.GLM5_NEXT,
    "deepseek_v4": LISTED,
    "deepseek_v4, older words": RATIOS,
    "llama": checkpoints.TINY_LLAMA,
}
GONE: Final = object()
ABSURD: Final = (-1, 1 << 60, -(1 << 60), 0.5, math.nan, math.inf, -1.5, 1e300)
WRONG: Final = ("x", {"a": {"b": 1}}, [["a"]], [1.5], ["x"] * 9, True, "9" * 4000)
MAY_SAY: Final[dict[str, tuple[object, ...]]] = {
    **dict.fromkeys(("rms_norm_eps", "routed_scaling_factor", "swiglu_limit"), (0.5,)),
    **dict.fromkeys(("hc_eps", "hc_magnitude", "final_logit_softcapping"), (0.5,)),
    **dict.fromkeys(("tie_word_embeddings", "index_share_for_mtp_iteration"), (True,)),
    "linear_lower_bound": (-1, -1.5),
    "compress_rates": ({"a": {"b": 1}},),
}
# Constants of a family's module that list keys it reads or knows.
LISTS: Final = (
    *("DEFAULTS", "FIXED", "READ", "WINDOW", "FOREIGN", "SHARED", "STREAMS", "POOLED", "RECURRENT"),
    *("SHARING", "GROUPS"),
)
ALWAYS: Final = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def said_of(raw: dict[str, Any]) -> dict[str, Any]:
    """Of the text, where that is inside."""
    text: dict[str, Any] = raw.get("text_config", raw)
    return text


def keys_of(raw: dict[str, Any]) -> list[str]:
    family = importlib.import_module(MODULES[raw["model_type"]])
    lists = [getattr(family, name) for name in LISTS if hasattr(family, name)]
    known = {key for each in lists for key in each}
    known |= {field.encode_name for field in msgspec.structs.fields(FileConfig)}
    known |= {*reading.FIXED, *reading.EQUAL, *reading.FOREIGN, "rope_scaling", "rope_theta"}
    known |= {"layer_types", "index_topk_pattern", "auto_map"}
    return sorted(known | said_of(raw).keys() - {"model_type"})


def damaged(raw: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    text = {**said_of(raw), key: value}
    if value is GONE:
        text.pop(key)
    return {**raw, "text_config": text} if "text_config" in raw else text


def outcome(raw: dict[str, Any]) -> ModelConfig | str:
    """What is read, or why not. Whatever is read has tensors and rows."""
    try:
        config = read_config(raw)
        expected_tensors(config)
        config.layout(row="f32", index="f32")
    except BadInput as error:
        return str(error)
    return config


def wrongs(key: str, value: object) -> Iterator[object]:
    may = MAY_SAY.get(key, ())
    yield from (wrong for wrong in (*ABSURD, *WRONG) if wrong not in may and wrong != value)


def test_all_families_are_here() -> None:
    here = {raw["model_type"] for raw in TINY.values()} | {"dots3_note", "glm5_next_text"}
    assert here == set(MODULES)


@pytest.mark.parametrize("family", TINY)
def test_a_wrong_value_is_refused_by_its_key(family: str) -> None:
    raw, failures = TINY[family], []
    whole = read_config(raw)
    for key in keys_of(raw):
        for wrong in wrongs(key, said_of(raw).get(key)):
            answer = outcome(damaged(raw, key, wrong))
            if answer != whole and (not isinstance(answer, str) or key not in answer):
                failures.append(f"{key} {wrong!r:.40}: {answer!r:.200}")
            if isinstance(answer, str) and ("\n" in answer or len(answer) > 400):
                failures.append(f"{key} {wrong!r:.40} is not said in a sentence: {answer:.500}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("family", TINY)
def test_a_missing_key_is_named_or_has_a_value_of_its_own(family: str) -> None:
    raw = TINY[family]
    for key in said_of(raw).keys() - {"model_type"}:
        for nothing in (GONE, None):
            answer = outcome(damaged(raw, key, nothing))
            assert isinstance(answer, ModelConfig) or key in answer, f"{key}: {answer}"
            assert isinstance(answer, str) or key not in ALWAYS, f"{family} was read without {key}"


NESTED: Final = [
    (family, key)
    for family, raw in TINY.items()
    for key, value in said_of(raw).items()
    if isinstance(value, dict)
]


@pytest.mark.parametrize(("family", "key"), NESTED)
def test_a_wrong_value_inside_of_an_object_is_refused_by_a_key(family: str, key: str) -> None:
    """By that inside, or by that of the object."""
    raw = TINY[family]
    whole, inside = read_config(raw), said_of(raw)[key]
    for name in inside:
        for wrong in (-1, "x", math.nan, 1e300, ["x"], {"a": 1}):
            answer = outcome(damaged(raw, key, {**inside, name: wrong}))
            named = isinstance(answer, str) and (name in answer or key in answer)
            assert named or answer == whole, f"{key}.{name} {wrong!r}: {answer!r:.200}"


@pytest.mark.parametrize("family", ["mistral_large4", "glm5_next"])
@pytest.mark.parametrize("wrong", ["x", 3, [1]])
def test_a_text_that_is_none_is_refused(family: str, wrong: object) -> None:
    answer = outcome({**TINY[family], "text_config": wrong})
    assert isinstance(answer, str)
    assert "text_config is" in answer


@pytest.mark.parametrize("wrong", ["deepseek_v9", "", None, 3, ["glm"], {"a": 1}, "x" * 4000])
def test_an_unknown_family_is_refused_by_name(wrong: object) -> None:
    answer = outcome({**checkpoints.TINY_V32, "model_type": wrong})
    assert isinstance(answer, str)
    assert answer.startswith("model_type ")
    assert "deepseek_v32" in answer
    assert len(answer) < 400
