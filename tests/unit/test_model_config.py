"""config.json -> ModelConfig -> ModelLayout: both spellings, every refusal by name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.models.config import ModelConfig
from ess.models.config_json.reading import EQUAL, FIXED, FOREIGN
from ess.models.registry import MODULES, family, read_config
from tests.support.checkpoints import DOTS3, GLM, V32

PUBLISHED_V32: dict[str, Any] = {
    **V32,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "index_topk": 2048,
    "index_n_heads": 64,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
    "rope_scaling": {**V32["rope_scaling"], "factor": 40, "original_max_position_embeddings": 4096},
}
PUBLISHED_GLM: dict[str, Any] = {
    **GLM,
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "v_head_dim": 256,
    "qk_nope_head_dim": 192,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "index_topk_pattern": None,
    "eos_token_id": [154820, 154827, 154829],
}


def test_published_configurations_give_the_known_layouts() -> None:
    v32, glm = read_config(PUBLISHED_V32), read_config(PUBLISHED_GLM)
    assert v32.layout(name="deepseek-v3.2") == ModelLayout.deepseek_v32()
    assert glm.layout(name="glm-5.2") == ModelLayout.glm_52()
    one_each = read_config({**PUBLISHED_GLM, "index_topk_freq": 1})
    assert one_each.layout(name="glm-5") == ModelLayout.glm_5()
    assert v32.attention_scale == pytest.approx(0.135234, abs=1e-6)
    assert v32.rope.rotation_scale == 1.0
    assert glm.mtp_shares_selection
    assert not v32.mtp_shares_selection
    assert glm.eos_ids == (154820, 154827, 154829)


def test_layers_own_experts_and_indexers_as_listed() -> None:
    glm = read_config(PUBLISHED_GLM)
    full = [layer for layer in range(78) if glm.has_indexer(layer)]
    assert full == [0, 1, 2, *range(6, 78, 4)]
    assert glm.has_indexer(78)
    assert [glm.has_experts(layer) for layer in (0, 2, 3, 78)] == [False, False, True, True]
    listed = read_config({**V32, "mlp_layer_types": ["sparse", "dense", "sparse", "dense"]})
    assert [listed.has_experts(layer) for layer in range(5)] == [True, False, True, False, True]


def test_old_and_new_rope_spellings_are_equal() -> None:
    new = {k: v for k, v in V32.items() if k not in ("rope_scaling", "rope_theta")}
    scaling = {**V32["rope_scaling"], "rope_type": "yarn", "rope_theta": 10000}
    del scaling["type"]
    assert read_config({**new, "rope_parameters": scaling}) == read_config(V32)
    plain = read_config({**new, "rope_scaling": None, "rope_theta": 5e5})
    assert plain.rope.kind == "default"
    assert plain.rope.theta == 5e5


def test_a_pattern_or_a_list_overrides_frequency_and_offset() -> None:
    expected = ((0,), (1, 2, 3), (4,))
    assert read_config({**GLM, "index_topk_pattern": "FFSS"}).groups == expected
    kinds = ["full", "full", "shared", "shared"]
    assert read_config({**GLM, "indexer_types": kinds}).groups == expected
    assert read_config(GLM).groups == ((0,), (1, 2), (3,), (4,))


def test_the_family_says_how_the_indexer_turns() -> None:
    assert read_config(V32).index_rope_style == "half"
    assert read_config(GLM).index_rope_style == "interleaved"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported; supported: axk2, deep"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_size": None}, "missing required field `hidden_size`"),
        ({"q_lora_rank": None}, "missing required field `q_lora_rank`"),
        ({"hidden_size": "256"}, r"Expected `int`, got `str` - at `\$.hidden_size`, got '256'"),
        ({"num_hidden_layers": 10**9}, r"<= 4096 - at `\$.num_hidden_layers`, got 1000000000"),
        ({"index_topk": 0}, "index_topk"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers"),
        ({"moe_intermediate_size": 100}, "moe_intermediate_size 100 is not a multiple of 8"),
        ({"rope_theta": 1.0}, r"> 1.0 - at `\$.rope_parameters.rope_theta`, got 1.0"),
        ({"n_group": 3}, "n_routed_experts 16 is not a multiple of n_group 3"),
        ({"topk_group": 5}, "topk_group 5 exceeds n_group 4"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds the 8 experts"),
        ({"n_group": 16}, "n_group 16 leaves 1 of 16 experts to a group"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim 63 is odd"),
        ({"qk_rope_head_dim": 256}, "qk_rope_head_dim 256 exceeds index_head_dim 128"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries for 4 layers"),
        ({"indexer_types": ["shared"] + ["full"] * 3}, "layer 0 must have an indexer"),
        ({"index_topk_pattern": "FXFF"}, "index_topk_pattern has 'X'"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', expected an object"),
        ({"rope_scaling": {"type": "dynamic"}}, "'dynamic'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling has no factor, which yarn needs"),
        ({"rope_scaling": {"type": "yarn", "factor": float("inf")}}, "factor"),
    ],
)
def test_bad_configurations_are_refused_by_name(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        read_config({**V32, **change})


def test_a_form_refuses_only_what_it_cannot_hold() -> None:
    odd = read_config({**V32, "kv_lora_rank": 51, "index_head_dim": 96})
    even = read_config({**V32, "kv_lora_rank": 50})
    assert odd.layout(row="f32", index="f32").row_bytes == 4 * (51 + 64)
    assert even.layout(row="bf16").row_bytes == 2 * (50 + 64)
    for config, row, sentence in (
        (even, "fp8", "kv_lora_rank 50 is not a multiple of 128, which fp8 rows need"),
        (odd, "bf16", "kv_lora_rank 51 is odd, but bf16 rows need it even"),
        (odd, "f32", "index_head_dim 96 is not a power of two, which fp8 index keys need"),
    ):
        with pytest.raises(BadInput, match=f"^config.json of deepseek_v32: {sentence}"):
            config.layout(row=row)


@pytest.mark.parametrize("base", [V32, DOTS3], ids=["v32", "dots3"])
def test_a_layout_asks_a_few_times_about_each_layer(
    base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, starts_group = [], ModelConfig.starts_group

    def counted(config: ModelConfig, layer: int) -> bool:
        asked.append(layer)
        return starts_group(config, layer)

    config = read_config({**base, "num_hidden_layers": 600})
    monkeypatch.setattr(ModelConfig, "starts_group", counted)
    assert config.layout().layer_count == 600
    assert 600 <= len(asked) < 5 * 600


def test_damaged_values_never_raise_anything_else() -> None:
    state = np.random.RandomState(0)
    junk = [
        None,
        -1,
        0,
        3,
        2**70,
        10**400,
        1.5,
        float("nan"),
        "x",
        [],
        ["full"],
        {},
        {"type": 1},
        True,
    ]
    names = [*V32, *FIXED, *EQUAL, *FOREIGN, "layer_types", "index_topk_pattern", "indexer_types"]
    names += ["rope_parameters", "original_max_position_embeddings", "indexer_rope_interleave"]
    inside = [*V32["rope_scaling"], "rope_type", "truncate", "attention_factor", "rope_theta"]
    refused = 0
    for _ in range(2000):
        changed = {**V32, "rope_scaling": dict(V32["rope_scaling"])}
        for name in state.choice(inside, state.randint(3)):
            changed["rope_scaling"][str(name)] = junk[state.randint(len(junk))]
        for name in state.choice(names, state.randint(3)):
            changed[str(name)] = junk[state.randint(len(junk))]
        try:
            config = read_config(changed)
            assert config.layout().group_count == len(config.groups)
        except BadInput:
            refused += 1
    assert 600 < refused < 2000


def test_reading_a_configuration_needs_no_torch() -> None:
    program = (
        "import sys; from ess.models.registry import MODULES, family\n"
        "[family(name) for name in MODULES]\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert all(callable(family(name).read) for name in MODULES)
