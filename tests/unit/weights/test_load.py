from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ess.errors import BadInput, BadState
from ess.models.load import load_model
from ess.models.weights.blocks import dequantise, quantise
from ess.models.weights.checkpoint import Checkpoint
from ess.models.weights.expected.split import Split
from ess.models.weights.rank import RankWeights
from ess.units import div_ceil

Written = tuple[Path, dict[str, torch.Tensor]]
Q_B = "model.layers.1.self_attn.q_b_proj.weight"
KV_A = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"


def exact(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """What a weight means, block by block, written for reading and not for speed."""
    weight = tensors[name].float()
    scale = tensors.get(name + "_scale_inv")
    if scale is None:
        return weight
    out = torch.empty_like(weight)
    for row in range(weight.shape[0]):
        for block in range(scale.shape[1]):
            columns = slice(block * 128, block * 128 + 128)
            out[row, columns] = weight[row, columns] * scale[row // 128, block]
    return out


@pytest.mark.parametrize("shard_count", [1, 3])
@pytest.mark.parametrize("family", ["small", "glm"])
def test_every_tensor_arrives(
    family: str, shard_count: int, request: pytest.FixtureRequest, write: Any, tmp_path: Path
) -> None:
    tensors = write(tmp_path, request.getfixturevalue(family), shard_count=shard_count)
    with Checkpoint(tmp_path) as checkpoint:
        weights = RankWeights(checkpoint, form="stored")
        streamed: dict[str, torch.Tensor] = {}
        for layer, of_layer in weights.stream():
            assert sorted(of_layer) == sorted(weights.names(layer))
            streamed |= of_layer
        for name, tensor in streamed.items():
            assert torch.equal(tensor.view(torch.uint8), tensors[name].view(torch.uint8)), name
        assert {n for n in tensors if not n.endswith("_scale_inv")} == set(streamed)


@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize("family", ["small", "glm"])
def test_without_shared_experts(
    family: str, is_written: bool, request: pytest.FixtureRequest, write: Any, tmp_path: Path
) -> None:
    """Tensors of no values, as transformers writes them, may be there or not."""
    config = {**request.getfixturevalue(family), "n_shared_experts": 0}
    tensors = write(tmp_path, config, shard_count=1)
    if not is_written:
        filled = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
        assert len(filled) < len(tensors)
        save_file(filled, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        for form in ("stored", "bf16", "f32"):
            weights = RankWeights(checkpoint, split=Split(tp=2), form=form)
            layers = [layer for _, layer in weights.stream()]
            assert sum(len(layer) for layer in layers) == len(checkpoint.specs)
    assert not load_model(tmp_path).layers[-1].experts.has_shared


def test_a_view_is_not_a_copy(written: Written) -> None:
    with Checkpoint(written[0]) as checkpoint:
        first, second = checkpoint.stored(Q_B), checkpoint.stored(Q_B)
        assert first.data_ptr() == second.data_ptr()
        assert RankWeights(checkpoint, form="stored").tensor(Q_B).data_ptr() == first.data_ptr()


def test_a_view_outlives_the_checkpoint(written: Written) -> None:
    with Checkpoint(written[0]) as checkpoint:
        view = checkpoint.stored(Q_B)
    assert torch.equal(view.float(), written[1][Q_B].float())
    with pytest.raises(BadState, match="closed"):
        checkpoint.stored(Q_B)


def test_partial_blocks_dequantise(written: Written) -> None:
    """576 rows: five rows of scales, the last for 64 rows."""
    assert written[1][KV_A + "_scale_inv"].shape == (5, 2)
    with Checkpoint(written[0]) as checkpoint:
        for name in (KV_A, Q_B, "model.layers.0.mlp.down_proj.weight"):
            want = exact(written[1], name)
            assert torch.equal(RankWeights(checkpoint, form="f32").tensor(name), want)
            got = RankWeights(checkpoint, form="bf16").tensor(name)
            assert torch.equal(got, want.bfloat16())


def test_bf16_keeps_norms_and_corrections(written: Written) -> None:
    with Checkpoint(written[0]) as checkpoint:
        weights = RankWeights(checkpoint, form="bf16")
        assert weights.tensor("model.norm.weight").dtype == torch.float32
        bias = "model.layers.1.mlp.gate.e_score_correction_bias"
        assert weights.tensor(bias).dtype == torch.float32
        assert weights.tensor("lm_head.weight").dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint8])
def test_bare_exponents_are_scales(
    dtype: torch.dtype, small: dict[str, Any], write: Any, tmp_path: Path
) -> None:
    tensors = write(tmp_path, small, shard_count=1)
    for name in tensors:
        if name.endswith("_scale_inv"):
            exponents = tensors[name].to(torch.float8_e8m0fnu)
            tensors[name] = exponents.view(torch.uint8).view(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    for name in tensors:
        if name.endswith("_scale_inv"):
            tensors[name] = tensors[name].view(torch.float8_e8m0fnu).float()
    with Checkpoint(tmp_path) as checkpoint:
        got = RankWeights(checkpoint, form="f32").tensor(KV_A)
    assert torch.equal(got, exact(tensors, KV_A))


@pytest.mark.parametrize("form", ["stored", "f32"])
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (1, 4), (2, 2)])
def test_ranks_join_to_the_whole(tp: int, ep: int, form: Any, written: Written) -> None:
    """Whole experts are on one expert-parallel rank, slices join along their cut, the rest is
    the same everywhere."""
    with Checkpoint(written[0]) as checkpoint:
        whole = RankWeights(checkpoint, form=form)
        ranks = [
            RankWeights(checkpoint, split=Split(tp=tp, tp_rank=t, ep=ep, ep_rank=e), form=form)
            for e in range(ep)
            for t in range(tp)
        ]
        for name, spec in checkpoint.specs.items():
            holders = [rank for rank in ranks if name in rank.names(spec.layer)]
            parts = [rank.tensor(name).float() for rank in holders[:tp]]
            want = whole.tensor(name).float()
            sliced = tp > 1 and spec.cut is not None and (spec.expert is None or ep == 1)
            joined = torch.cat(parts, spec.cut.dim) if sliced and spec.cut else parts[-1]
            assert torch.equal(joined, want), name
            assert len(holders) == (tp if spec.expert is not None else tp * ep)
            if sliced and form == "stored" and checkpoint.blocked(name):
                scales = [rank.scale(name) for rank in holders[:tp]]
                assert spec.cut is not None
                assert torch.equal(torch.cat(scales, spec.cut.dim), whole.scale(name))


def test_a_cut_block_is_refused_by_name(written: Written) -> None:
    refusal = r"layers\.0\.self_attn\.o_proj\.weight.*slices of 64, which cut a 128-wide"
    with Checkpoint(written[0]) as checkpoint, pytest.raises(BadInput, match=refusal):
        RankWeights(checkpoint, split=Split(tp=4))
    with Checkpoint(written[0]) as checkpoint, pytest.raises(BadInput, match="96 parts"):
        RankWeights(checkpoint, split=Split(tp=5))


def test_unequal_experts_are_refused(written: Written) -> None:
    with Checkpoint(written[0]) as checkpoint, pytest.raises(BadInput, match="4 routed experts"):
        RankWeights(checkpoint, split=Split(ep=3))


def test_mtp_off(written: Written) -> None:
    with Checkpoint(written[0], mtp=False) as checkpoint:
        assert not any(".layers.3." in name for name in checkpoint.specs)
    with Checkpoint(written[0]) as checkpoint:
        assert "model.layers.3.eh_proj.weight" in checkpoint.specs


def test_a_name_of_another_rank(written: Written) -> None:
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    with Checkpoint(written[0]) as checkpoint:
        weights = RankWeights(checkpoint, split=Split(ep=2, ep_rank=1))
        with pytest.raises(BadInput, match="on another expert-parallel rank"):
            weights.tensor(name)
        with pytest.raises(BadInput, match="not of this model"):
            weights.tensor("model.layers.1.mlp.experts.9.up_proj.weight")


def test_the_embedded_shape_loads_again_and_again(
    embedded: dict[str, Any], write: Any, tmp_path: Path
) -> None:
    tensors = write(tmp_path, embedded, shard_count=1)
    assert 15e6 < sum(t.nbytes for t in tensors.values()) < 25e6
    for _ in range(2):
        with Checkpoint(tmp_path) as checkpoint:
            loaded = [name for _, layer in RankWeights(checkpoint).stream() for name in layer]
        assert len(loaded) == len(checkpoint.specs)


@pytest.mark.parametrize("size", [(1, 1), (128, 128), (576, 256), (130, 300)])
def test_blocks_round_trip(size: tuple[int, int]) -> None:
    weight = torch.randn(size, generator=torch.Generator().manual_seed(3))
    weight[0] = 0
    values, scale = quantise(weight)
    assert scale.shape == (div_ceil(size[0], 128), div_ceil(size[1], 128))
    assert torch.equal(scale, torch.exp2(torch.log2(scale).round()))
    restored = dequantise(values, scale, dtype=torch.float32)
    torch.testing.assert_close(restored, weight, rtol=1 / 16, atol=1e-4)
    with pytest.raises(BadInput, match="finite"):
        quantise(torch.full((2, 2), torch.nan))


def test_indexers_of_layers_that_share_may_be_there(
    write: Any, glm: dict[str, Any], tmp_path: Path
) -> None:
    """As in GLM-5.1, whose configuration an operator may change so."""
    count = glm["num_hidden_layers"]
    own = {name: value for name, value in glm.items() if not name.startswith("index_topk_")}
    tensors = write(tmp_path, {**own, "indexer_types": ["full"] * count})
    shared = {**own, "indexer_types": ["full", *["shared"] * (count - 1)]}
    (tmp_path / "config.json").write_text(json.dumps(shared))
    named = "model.layers.1.self_attn.indexer.wk.weight"
    assert named in tensors
    with Checkpoint(tmp_path) as checkpoint:
        assert named not in checkpoint.specs
        assert named.replace("layers.1.", "layers.0.") in checkpoint.specs
