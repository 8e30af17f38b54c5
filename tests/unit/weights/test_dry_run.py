from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.models.registry import read_config as parse_config
from ess.models.weights.__main__ import main
from ess.models.weights.checkpoint import Checkpoint
from ess.models.weights.expected.dry_run import CheckpointPlan, make_plan, read_config
from ess.models.weights.expected.shapes import expected_tensors
from ess.models.weights.expected.split import Split
from ess.models.weights.rank import RankWeights


@functools.cache
def published(name: str) -> CheckpointPlan:
    return make_plan(read_config(name))


def test_the_published_checkpoints_close() -> None:
    deepseek = published("deepseek-v3.2").whole
    assert deepseek.tensors == 92_425
    assert deepseek.bytes == 689_471_107_200
    assert deepseek.values == 685_396_921_376
    glm = published("glm-5.2").whole
    assert glm.tensors == 59_585
    assert glm.values == 753_329_940_480


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("a.x-k2-light", 20_314_500_992),
        ("hy4-preview", 58_278_201_581),
        ("mistral-large-4", 1_050_118_202_912),
        ("dots3-note", 279_551_729_536),
        ("glm-5.3-flash", 313_326_811_966),
    ],
)
def test_as_many_values_as_transformers_makes_of_the_same_configuration(
    name: str, values: int
) -> None:
    assert published(name).whole.values == values


def test_experts_in_one_tensor_are_not_shared_among_ranks() -> None:
    with pytest.raises(BadInput, match="ep 4 is not supported for hy_v4"):
        make_plan(read_config("hy4-preview"), ep=4)


def test_glm_5_has_an_indexer_in_every_layer() -> None:
    config = {**read_config("glm-5.2"), "index_topk_freq": 1}
    assert make_plan(config).whole.tensors == 59_870


def test_the_layouts_are_those_of_the_pools() -> None:
    """The same groups, rows and keys that `ModelLayout` states on its own."""
    for name, layout in (
        ("deepseek-v3.2", ModelLayout.deepseek_v32()),
        ("glm-5.2", ModelLayout.glm_52()),
    ):
        planned = published(name).layout
        assert planned.groups == layout.groups
        assert planned.host_page_bytes == layout.host_page_bytes
        assert planned.index_page_bytes == layout.index_page_bytes


# Some rows of the published tables, copied by hand: the formula must not only add up.
PUBLISHED: dict[str, dict[str, tuple[int, ...]]] = {
    "deepseek-v3.2": {
        "model.layers.0.self_attn.q_b_proj.weight": (24576, 1536),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        "model.layers.61.self_attn.kv_b_proj.weight": (32768, 512),
        "model.layers.30.self_attn.o_proj.weight": (7168, 16384),
        "model.layers.5.self_attn.indexer.wq_b.weight": (8192, 1536),
        "model.layers.5.self_attn.indexer.k_norm.bias": (128,),
        "model.layers.5.self_attn.indexer.weights_proj.weight": (64, 7168),
        "model.layers.2.mlp.down_proj.weight": (7168, 18432),
        "model.layers.3.mlp.experts.255.gate_proj.weight": (2048, 7168),
        "model.layers.60.mlp.gate.e_score_correction_bias": (256,),
        "model.layers.61.eh_proj.weight": (7168, 14336),
        "model.layers.61.shared_head.head.weight": (129280, 7168),
        "model.embed_tokens.weight": (129280, 7168),
    },
    "glm-5.2": {
        "model.layers.0.self_attn.kv_b_proj.weight": (28672, 512),
        "model.layers.6.self_attn.indexer.wq_b.weight": (4096, 2048),
        "model.layers.78.self_attn.indexer.wk.weight": (128, 6144),
        "model.layers.78.shared_head.norm.weight": (6144,),
        "model.layers.1.mlp.up_proj.weight": (12288, 6144),
    },
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_shapes(name: str) -> None:
    specs = {spec.name: spec for spec in expected_tensors(parse_config(read_config(name)))}
    for tensor, shape in PUBLISHED[name].items():
        assert specs[tensor].shape == shape
    absent = "model.layers.78.embed_tokens.weight", "model.layers.7.self_attn.indexer.wk.weight"
    assert name != "glm-5.2" or not any(tensor in specs for tensor in absent)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_planned_bytes_are_loaded_bytes(
    tp: int, ep: int, small: dict[str, Any], written: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    plan = make_plan(small, tp=tp, ep=ep)
    with Checkpoint(written[0]) as checkpoint:
        for split in (Split(tp=tp, ep=ep), Split(tp=tp, tp_rank=tp - 1, ep=ep, ep_rank=ep - 1)):
            weights = RankWeights(checkpoint, split=split, form="stored")
            tensors = [t for _, layer in weights.stream() for t in layer.values()]
            blocked = [n for n in checkpoint.specs if checkpoint.blocked(n)]
            held = {name for layer in (None, 0, 1, 2, 3) for name in weights.names(layer)}
            tensors += [weights.scale(name) for name in blocked if name in held]
            assert plan.rank.tensors == len(tensors)
            assert plan.rank.bytes == sum(tensor.nbytes for tensor in tensors)
            loaded = RankWeights(checkpoint, split=split, form="bf16").stream()
            assert plan.rank.bf16_bytes == sum(
                tensor.nbytes for _, layer in loaded for tensor in layer.values()
            )


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--dry-run", "deepseek-v3.2", "--ep", "32"]) == 0
    printed = capsys.readouterr().out
    assert "92,425" in printed
    assert "689,471,107,200" in printed
    assert "62 rows of 656 bytes, 62 index keys of 132 bytes" in printed
    assert main(["--dry-run", "deepseek-v3.2", "--tp", "128"]) == 1
    assert "q_b_proj" in capsys.readouterr().err
    assert main(["--dry-run", str(tmp_path / "none.json")]) == 1
    assert main(["--dry-run", "glm-5.2", "--ctx", "0"]) == 1


def test_mtp_is_the_last_layer() -> None:
    config = read_config("deepseek-v3.2")
    without = make_plan(config, mtp=False)
    assert without.layout.layer_total == 61
    assert published("deepseek-v3.2").whole.tensors - without.whole.tensors == 1571
    with pytest.raises(BadInput, match="7 expert-parallel"):
        make_plan(config, ep=7)
