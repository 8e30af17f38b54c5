"""Further families: transformers' logits; what is refused. Engines are in tests/families."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from ess.models import registry as known_families
from ess.models.load import load_model
from ess.models.plain import Plain
from ess.models.registry import build, read_config
from ess.models.weights.expected.dry_run import read_config as read_published
from tests.families.test_covered import FIRST
from tests.model import grid
from tests.support import checkpoints, own_family
from tests.support.greedy import greedy

FAMILIES = {
    "axk2": checkpoints.AXK2,
    "hy_v4": checkpoints.HY4,
    "mistral_large4": checkpoints.MISTRAL4,
    "dots3": checkpoints.DOTS3,
    "glm5_next": checkpoints.GLM5_NEXT,
    "glm5_next, no linear layers": checkpoints.GLM5_NEXT_ROWS,
}
TINY = {
    "axk2": checkpoints.TINY_AXK2,
    "hy_v4": checkpoints.TINY_HY4,
    "mistral_large4": checkpoints.TINY_MISTRAL4,
    "dots3": checkpoints.TINY_DOTS3,
    "glm5_next": checkpoints.TINY_GLM5_NEXT,
}
NORM_EPS = {"axk2": 1e-6, "hy_v4": 1e-6}
"""Of the norms on the two latents, in transformers; elsewhere the model's."""
LENGTH, PREFILL, TOLERANCE = 160, 120, 1e-4
PIECES = [PREFILL] + [1] * 8 + [4] * 8
SEED = 22


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


class Case:
    def __init__(self, family: str, folder: Path, **changes: Any) -> None:
        pytest.importorskip("transformers", reason="extra `oracle` is not installed")
        from tests.support.oracle import Oracle

        raw = {**FAMILIES[family], **changes}
        self.raw = raw
        self.model = checkpoints.model(raw, latent_norm_eps=NORM_EPS.get(family))
        self.tokens = checkpoints.tokens(LENGTH, raw["vocab_size"], seed=SEED)
        self.weights = checkpoints.tensors(self.model.config)
        written = checkpoints.published(self.weights, self.model.config)
        self.oracle = Oracle(folder, raw, written)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("oracle"))


@pytest.mark.slow
def test_logits_in_one_go_and_piece_by_piece(case: Case) -> None:
    whole = Plain(case.model).run(case.tokens).logits
    assert far(whole, case.oracle.logits(case.tokens, [LENGTH])) < TOLERANCE
    plain, logits = Plain(case.model), []
    for stop, count in zip(itertools.accumulate(PIECES), PIECES, strict=True):
        logits.append(plain.run(case.tokens[stop - count : stop]).logits)
    assert far(torch.cat(logits), case.oracle.logits(case.tokens, PIECES)) < TOLERANCE


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(case: Case) -> None:
    prompt = case.tokens[:100]
    assert greedy(case.model, prompt, 16) == case.oracle.greedy(prompt, 16)


LINEAR = [
    {"linear_lower_bound": None},
    {"linear_attn_config": {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 3}},
    {"linear_attn_config": {"gate_lower_bound": -2.0}, "index_kpool": 16},
]


@pytest.mark.slow
@pytest.mark.parametrize("change", LINEAR)
def test_linear_attention_in_other_words(change: dict[str, Any], tmp_path: Path) -> None:
    raw = checkpoints.glm5_next("LI", **change)
    case = Case("glm5_next", tmp_path, **raw)
    pieces = [60, 1, 1, 18]
    ours = Plain(case.model).run(case.tokens[:80]).logits
    assert far(ours, case.oracle.logits(case.tokens[:80], pieces)) < TOLERANCE


@pytest.mark.slow
def test_a_checkpoint_that_transformers_has_saved_is_read(tmp_path: Path) -> None:
    """Of hy_v4 it saves the gates of dense blocks under the name of attention's."""
    case = Case("axk2", tmp_path / "given")
    case.oracle.save(tmp_path / "saved")
    model, some = load_model(tmp_path / "saved", form="f32"), case.tokens[:60]
    ours = checkpoints.model(FAMILIES["axk2"])
    assert torch.equal(Plain(model).run(some).logits, Plain(ours).run(some).logits)


@pytest.mark.slow
def test_experts_of_groups_that_were_left_out_count_as_zero(tmp_path: Path) -> None:
    """Where the kept group's two scores are below zero, the other group's two are chosen."""
    few = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    case = Case("axk2", tmp_path / "plain", **few)
    for name in case.weights:
        if name.endswith("e_score_correction_bias"):
            case.weights[name] -= 1.0
    from tests.support.oracle import Oracle

    raw, config = {**FAMILIES["axk2"], **few}, case.model.config
    model = build(config, case.weights.__getitem__)
    theirs = Oracle(tmp_path / "low", raw, case.weights).read(case.tokens, [LENGTH]).logits
    assert far(Plain(model).run(case.tokens).logits, theirs) < TOLERANCE
    other = build(
        msgspec.structs.replace(config, expert_groups_zeroed=False), case.weights.__getitem__
    )
    assert far(Plain(other).run(case.tokens).logits, theirs) > 100 * TOLERANCE


PARTS = [
    ("axk2", "input_layernorm.W_up.weight"),
    ("axk2", "post_attention_layernorm.W_down.weight"),
    ("axk2", "self_attn.q_b_proj.weight"),
    ("hy_v4", "self_attn.learnable_sink_param"),
    ("hy_v4", "self_attn.linear_gate.weight"),
    ("hy_v4", "hc_attn_layer.hc_fn"),
    ("hy_v4", "hc_mlp_layer.hc_base"),
    ("hy_v4", "hc_head.hc_head_fn"),
    ("mistral_large4", "self_attn.softmax_scaling.scale"),
    ("mistral_large4", "self_attn.softmax_scaling.bias"),
    ("mistral_large4", "indexer.softmax_scaling.scale"),
    ("mistral_large4", "indexer.q_input_norm.weight"),
    ("mistral_large4", "indexer.q_input_norm.bias"),
    ("mistral_large4", "rotary_emb.alpha"),
    ("glm5_next", "indexer.index_kpool_compress_ape"),
    ("glm5_next", "indexer.index_kpool_compress_gate"),
    ("glm5_next", "hc_attn_fn"),
    ("glm5_next", "hc_ffn_base"),
    ("dots3", "layers.1.self_attn.g_proj.weight"),
    ("dots3", "layers.2.self_attn.g_proj.weight"),
    ("dots3", "layers.1.self_attn.k_rope_only_layernorm.weight"),
    ("dots3", "layers.2.self_attn.k_rope_only_layernorm.weight"),
]


@pytest.mark.parametrize(("family", "part"), PARTS)
def test_what_a_family_adds_changes_its_logits(family: str, part: str) -> None:
    """A part that is left out would be seen."""
    raw, line = TINY[family], checkpoints.tokens(40, 128, seed=3)
    config = read_config(raw)
    weights = checkpoints.tensors(config)
    touched = [name for name in weights if name.endswith(part)]
    assert touched
    before = Plain(build(config, weights.__getitem__)).run(line).logits
    for name in touched:
        weights[name] = weights[name].flip(0)
    assert far(Plain(build(config, weights.__getitem__)).run(line).logits, before) > 1e-3


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("axk2", {"n_group": None}, "topk_group is given without n_group"),
    ("axk2", {"topk_group": None}, "n_group is given without topk_group"),
    ("axk2", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers 1 is not supported"),
    ("axk2", {"gated_norm_rank": "x"}, "gated_norm_rank"),
    ("axk2", {"index_topk_freq": 2}, "index_topk_freq 2 lets layers share an indexer"),
    ("axk2", {"indexer_rope_interleave": True}, "indexer_rope_interleave true is not supported"),
    ("hy_v4", {"rope_interleave": True}, "rope_interleave true is not supported"),
    ("hy_v4", {"hc_mult": 0}, "hc_mult"),
    ("hy_v4", {"hc_mult": 1}, "hc_mult 1 is not supported, only several residual streams"),
    ("hy_v4", {"swiglu_limit": -1.0}, "swiglu_limit"),
    ("hy_v4", {"indexer_types": ["shared"] * 6}, "layer 0 must have an indexer of its own"),
    ("mistral_large4", {"kv_source_layers": [0, 0, 2, 3, 4]}, "kv_source_layers lets layers share"),
    ("mistral_large4", {"no_rope_layers": [1, 0]}, "no_rope_layers is .1, 0., expected 0 or 1 for"),
    ("mistral_large4", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0, expected a"),
    ("mistral_large4", {"q_lora_rank": 8}, "q_lora_rank 8 is not supported, only null"),
    ("mistral_large4", {"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
    ("dots3", {"rope_scaling": {"factor": 2}}, "rope_scaling is not supported, only rope_theta"),
    ("dots3", {"layer_types": ["odd"] * 6}, "layer_types is .'odd'"),
    ("dots3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_laye"),
    ("dots3", {"layer_types": [["odd"]] * 6}, "layer_types is ..'odd'"),
    ("dots3", {"num_hidden_layers": "x"}, "num_hidden_layers`, got 'x'"),
    ("dots3", {"num_hidden_layers": 1 << 40}, "num_hidden_layers`, got 1099511627776"),
    ("mistral_large4", {"num_hidden_layers": "x"}, "num_hidden_layers`, got 'x'"),
    ("mistral_large4", {"num_hidden_layers": 1 << 40}, "num_hidden_layers`, got 1099511627776"),
    ("mistral_large4", {"no_rope_layers": [[1]] * 5}, "no_rope_layers is ..1."),
    ("dots3", {"sliding_window": 17}, "sliding_window 17 exceeds index_topk 16"),
    ("dots3", {"sliding_window": 0}, "sliding_window"),
    ("dots3", {"swa_kv_lora_rank": "x"}, "swa_kv_lora_rank`, got 'x'"),
    (
        "dots3",
        {"swa_qk_rope_head_dim": 32},
        "swa_qk_rope_head_dim 32 differs from qk_rope_head_dim 64",
    ),
    ("dots3", {"swa_num_key_value_heads": 1}, "_heads 1 differs from swa_num_attention_heads 2"),
    ("dots3", {"use_dsa": False}, "use_dsa false is not supported"),
    ("mistral_large4", {"norm_topk_prob": False}, "norm_topk_prob false is not supported"),
    ("glm5_next", {"qk_rope_head_dim": 64}, "qk_rope_head_dim 64 is not supported, only 0"),
    ("glm5_next", {"index_topk": 17}, "index_topk 17 is not a multiple of index_kpool 4"),
    ("glm5_next", {"index_kpool": 0}, "index_kpool`, got 0"),
    ("glm5_next", {"index_kpool": 1}, "index_kpool 1 is not supported, only units of several"),
    ("glm5_next", {"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail fa"),
    ("glm5_next", {"index_kpool_compress": False}, "index_kpool_compress false is not supported"),
    ("glm5_next", {"layer_types": ["odd"] * 4}, "layer_types is .'odd'"),
    ("glm5_next", {"layer_types": ["linear_attention"] * 6}, "layer_types has no layer with an"),
    ("glm5_next", {"linear_lower_bound": 1.0}, "linear_lower_bound`, got 1.0"),
    ("glm5_next", {"linear_attn_config": 3}, "linear_attn_config is 3, expected an object"),
    ("glm5_next", {"hc_sinkhorn_iters": "x"}, "hc_sinkhorn_iters`, got 'x'"),
]


def changed(family: str, change: dict[str, Any]) -> dict[str, Any]:
    """Of a model around its text, the text."""
    raw = TINY[family]
    if "text_config" in raw:
        return {**raw, "text_config": {**raw["text_config"], **change}}
    return {**raw, **change}


def test_a_model_without_its_text_is_refused() -> None:
    with pytest.raises(BadInput, match="mistral_large4: text_config is None, expected an"):
        read_config({"model_type": "mistral_large4"})


@pytest.mark.parametrize(("family", "change", "said"), REFUSED)
def test_what_is_not_computed_is_refused(family: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said) as refusal:
        read_config(changed(family, change))
    assert str(refusal.value).startswith(f"config.json of {TINY[family]['model_type']}: ")


def test_glm_5_next_as_its_checkpoint_says_it() -> None:
    """zai-org/GLM-5.3-Flash has another name for layers with an indexer, its linear ones in an
    object, and keys that say what the model does anyway."""
    ours = read_published("glm-5.3-flash")
    linear, sparse = "linear_attention", "deepseek_sparse_attention"
    kinds = [sparse if n % 4 == 3 else linear for n in range(45)]
    kinds_of_mlp = ["dense"] * 3 + ["sparse"] * 42
    own = {key: said for key, said in ours["text_config"].items() if not key.startswith("linear_")}
    theirs = {
        **own,
        "layer_types": kinds,
        "linear_attn_config": {
            "num_heads": 64,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "kda_layers": [n for n in range(45) if kinds[n] == linear],
            "full_attn_layers": [n for n in range(45) if kinds[n] == sparse],
        },
        **dict.fromkeys(("mhc", "mla_use_nope", "index_kpool_compress"), True),
        **dict.fromkeys(("indexer_rope_interleave", "index_share_for_mtp_iteration"), True),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_dtype": "float32",
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
        "head_dim": 0,
    }
    listed = {"indexer_types": ["full"] * 45, "mlp_layer_types": kinds_of_mlp}
    ours["text_config"].update(listed)
    config = read_config(ours)
    assert read_config({**ours, "text_config": {**theirs, **listed}}) == config
    index = config.layout().index
    assert index is not None
    assert index.unit == 4


def test_a_selection_cannot_be_shared_across_a_layer_without_rows() -> None:
    kinds = {"indexer_types": ["full", "full", "full", "full", "shared", "full"]}
    with pytest.raises(BadInput, match="layer 4 must have an indexer of its own, behind one witho"):
        read_config(checkpoints.glm5_next("LLLLIL", **kinds))
    read_config(checkpoints.glm5_next("LLLIIL", **kinds))


def test_tokens_that_are_taken_back_leave_no_trace() -> None:
    """At each place of a unit, with layers that have a state."""
    raw = checkpoints.glm5_next("LIL", index_topk=8, index_kpool=4)
    model, line = checkpoints.model(raw), checkpoints.tokens(40, 512, seed=6)
    whole = Plain(model).run(line).logits
    for kept in range(20, 25):
        plain = Plain(model)
        plain.run(line[:kept])
        plain.run([7, 8, 9])
        plain.keep(kept)
        assert far(plain.run(line[kept:]).logits, whole[kept:]) < TOLERANCE


def test_fields_of_ours_mean_nothing_in_a_file() -> None:
    for raw in (checkpoints.TINY_V32, checkpoints.TINY_GLM):
        ours = {"key_head_count": 4, "latent_norm_eps": 0.5, "hc_mult": 4, "has_sinks": True}
        assert read_config({**raw, **ours}) == read_config(raw)


def test_a_family_of_one_s_own_is_one_short_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said to the registry it is read, checked against the shape formula, built and decoded."""
    known = {**known_families.MODULES, "own": own_family.__name__}
    monkeypatch.setattr(known_families, "MODULES", known)
    raw = {**checkpoints.TINY_V32, "model_type": "own", "num_nextn_predict_layers": 0}
    monkeypatch.setitem(grid.RANDOM, "own", raw)
    way = {**FIRST["deepseek_v32"], "checkpoint": "own", "mtp": "1", "arena": "tight"}
    assert grid.differences(way) == []
    source = Path(own_family.__file__).read_text().splitlines()
    assert sum(bool(line) and not line.startswith(("from", "import", '"')) for line in source) < 30


@pytest.mark.parametrize("family", TINY)
def test_fp8_rows_and_keys_are_the_same_offloaded_and_resident(family: str) -> None:
    model, line = checkpoints.model(TINY[family]), checkpoints.tokens(150, 128, seed=4)
    layout = model.config.layout()
    said = []
    for mode, arena in (("resident", "ample"), ("none", "tight")):
        offload = Offload.create(
            layout,
            slot_bytes=grid.slot_bytes(layout, arena),
            host_bytes=12 * layout.host_page_bytes,
            length_max=256,
            slot_floor=layout.top_k,
            poison=True,
        )
        engine = Engine(model, offload, EngineConfig(modes=mode))
        request = engine.add(line, Sampling(tokens_max=12, ignore_eos=True))
        for _ in engine.run():
            offload.check()
        said.append(request.output)
        offload.close()
    assert said[0] == said[1]
