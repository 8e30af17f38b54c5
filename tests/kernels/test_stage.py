"""Compiled stages against the same arithmetic in torch, and bits that neighbours cannot change."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ess.errors import BadInput
from ess.kernels.cpu import native
from ess.kernels.cpu.stage import Heads, Routing, Stage, pack
from ess.layout import IndexCodec, ModelLayout, RowCodec
from ess.models.decoder import DecoderLayer
from ess.models.layers import Rotation
from ess.models.model import Model
from ess.models.moe import _best
from tests.kernels.sets import cpu, reference
from tests.support import checkpoints
from tests.support.built import needs_native

pytestmark = needs_native

ODD = {
    **checkpoints.V32,
    "hidden_size": 200,
    "q_lora_rank": 72,
    "v_head_dim": 20,
    "qk_nope_head_dim": 36,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 104,
    "moe_intermediate_size": 24,
    "index_n_heads": 5,
}
RAWS = {"v32": checkpoints.V32, "glm": checkpoints.GLM, "odd": ODD}
LAYERS = (0, 1, 2)
COUNTS = (1, 2, 3, 5, 16, 17, 40)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@functools.cache
def model(name: str) -> Model:
    return checkpoints.model(RAWS[name])


@functools.cache
def narrow(name: str) -> Model:
    config = model(name).config
    weights = checkpoints.tensors(config)
    return Model(config, lambda key: weights[key].bfloat16())


@functools.cache
def layout(name: str, form: str) -> ModelLayout:
    return model(name).config.layout(row=form, index="fp8" if form == "fp8" else "f32")


def inputs(name: str, count: int) -> tuple[Tensor, Tensor, Rotation]:
    c = model(name).config
    random = torch.Generator().manual_seed(count)
    hidden = torch.randn(count, c.hidden_dim, generator=random)
    attended = torch.randn(count, c.head_count, c.latent_dim, generator=random)
    return hidden, attended, model(name).rotation(torch.arange(count) * 37)


def everything(
    layer: DecoderLayer, shape: ModelLayout, given: tuple[Tensor, Tensor, Rotation], **how: Any
) -> list[Tensor]:
    hidden, attended, rotation = given
    compiled = layer.compiled(shape)
    front = compiled.front(hidden, rotation, **how)
    return [
        *(part for part in front if part is not None),
        compiled.queries(front.query, rotation, **how),
        compiled.back(hidden, attended, **how),
    ]


def by_torch(layer: DecoderLayer, given: tuple[Tensor, Tensor, Rotation]) -> list[Tensor]:
    """In the order of `everything`, rows and keys as float32."""
    hidden, attended, rotation = given
    entry = layer.enter(hidden)
    made = [entry.query, layer.mla.rows(entry.row, rotation)]
    if layer.indexer is not None:
        made += layer.index(entry, rotation)
    made.append(layer.mla.queries(entry.query, rotation))
    return [*made, layer.mlp(layer.output(hidden, attended))]


def as_values(tensor: Tensor) -> Tensor:
    return tensor.view(torch.float32) if tensor.dtype == torch.uint8 else tensor


def far(ours: Tensor, theirs: Tensor) -> float:
    ours = as_values(ours)
    assert ours.shape == theirs.shape
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


def middle(ours: Tensor, theirs: Tensor) -> float:
    """Of the tokens: one may be sent to other experts by a rounding."""
    pairs = zip(as_values(ours).split(1), theirs.split(1), strict=True)
    return float(torch.tensor([far(*pair) for pair in pairs]).median())


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", RAWS)
def test_float32_agrees_with_torch(name: str, count: int) -> None:
    given = inputs(name, count)
    for number in LAYERS:
        layer = model(name).layers[number]
        ours, theirs = everything(layer, layout(name, "f32"), given), by_torch(layer, given)
        for each, other in zip(ours, theirs, strict=True):
            assert far(each, other) < 3e-6, f"layer {number}"


@pytest.mark.parametrize("name", RAWS)
def test_bfloat16_is_nearer_to_exact_than_torch(name: str) -> None:
    hidden, attended, rotation = inputs(name, 9)
    given = hidden.bfloat16(), attended, rotation
    wide = {
        key: tensor.bfloat16() for key, tensor in checkpoints.tensors(model(name).config).items()
    }
    exact = Model(model(name).config, lambda key: wide[key].float())
    for number in LAYERS:
        layer = narrow(name).layers[number]
        ours, theirs = everything(layer, layout(name, "f32"), given), by_torch(layer, given)
        truth = by_torch(exact.layers[number], (given[0].float(), attended, rotation))
        for each, other, true in zip(ours, theirs, truth, strict=True):
            assert middle(each, true) < 1e-2
            assert middle(each, true) < 1.1 * middle(other, true) + 1e-6


@pytest.mark.parametrize("form", ["f32", "fp8"])
@pytest.mark.parametrize("name", RAWS)
def test_a_token_gets_the_same_bits_in_any_company(name: str, form: str) -> None:
    layer = (model if form == "f32" else narrow)(name).layers[1]
    hidden, attended, rotation = inputs(name, 40)
    together = everything(layer, layout(name, form), (hidden, attended, rotation))
    for part in (slice(0, 1), slice(7, 9), slice(13, 40)):
        some = hidden[part], attended[part], rotation.part(part)
        for each, all_of_them in zip(
            everything(layer, layout(name, form), some), together, strict=True
        ):
            assert torch.equal(each, all_of_them[part])
    for threads in (2, 3, 64):
        again = everything(layer, layout(name, form), (hidden, attended, rotation), threads=threads)
        assert all(map(torch.equal, again, together))


def test_twenty_repeats_are_bitwise_equal() -> None:
    layer, given = narrow("v32").layers[1], inputs("v32", 17)
    first = everything(layer, layout("v32", "fp8"), given)
    for _ in range(20):
        assert all(map(torch.equal, everything(layer, layout("v32", "fp8"), given), first))


@pytest.mark.parametrize("made", [model, narrow])
def test_a_broken_token_breaks_itself_only(made: Callable[[str], Model]) -> None:
    layer = made("v32").layers[1]
    hidden, attended, rotation = inputs("v32", 6)
    clean = everything(layer, layout("v32", "f32"), (hidden, attended, rotation))
    broken, torn = hidden.clone(), attended.clone()
    broken[2], torn[2] = torch.nan, torch.nan
    for each, other in zip(
        everything(layer, layout("v32", "f32"), (broken, torn, rotation)), clean, strict=True
    ):
        keep = [0, 1, 3, 4, 5]
        assert torch.equal(each[keep], other[keep])
        assert as_values(each)[2].isnan().any()


def test_inputs_with_gaps_are_read_right() -> None:
    layer, (hidden, attended, rotation) = model("v32").layers[1], inputs("v32", 5)
    wide, tall = hidden.repeat(1, 2), attended.repeat_interleave(2, 0)
    wide[:, hidden.shape[1] :] = torch.nan
    tall[1::2] = torch.nan
    gaps = wide[:, : hidden.shape[1]], tall[::2], rotation
    plain = everything(layer, layout("v32", "f32"), (hidden, attended, rotation))
    assert all(map(torch.equal, everything(layer, layout("v32", "f32"), gaps), plain))


@pytest.mark.parametrize("codec", [RowCodec(), RowCodec(form="bf16"), RowCodec(form="f32")])
def test_rows_are_encoded_as_the_codec_does(codec: RowCodec) -> None:
    values = torch.randn(19, 576) * torch.logspace(-6, 4, 19)[:, None]
    stage = Stage()
    stage.give_row(stage.take(576), codec)
    out = torch.empty(19, codec.row_bytes, dtype=torch.uint8)
    assert torch.equal(stage([values])[0], reference.encode_rows(values, codec, out))


@pytest.mark.parametrize("scale_format", ["ue8m0", "f32"])
def test_keys_are_encoded_as_the_codec_does(scale_format: Any) -> None:
    codec = IndexCodec(scale_format=scale_format)
    values = torch.randn(19, 128)
    stage = Stage()
    stage.give_key(stage.take(128), codec)
    keys = reference.encode_keys(values, codec)
    [ours] = stage([values])
    assert torch.equal(ours[:, :128], keys.values)
    assert torch.equal(ours[:, 128:].contiguous().view(torch.float32)[:, 0], keys.scales)


@pytest.mark.parametrize("dim", [1, 2, 8, 128])
def test_a_hadamard_transform_is_the_reference_s(dim: int) -> None:
    values, stage = torch.randn(5, 3, dim), Stage()
    taken = stage.take(3 * dim)
    stage.hadamard(Heads(taken.part(0, dim), 3, dim))
    stage.give(taken, torch.float32, 3, dim)
    torch.testing.assert_close(stage([values])[0], reference.hadamard(values))


@pytest.mark.parametrize(("out_dim", "in_dim"), [(1, 1), (16, 2), (17, 3), (65, 130), (128, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_of_any_size(out_dim: int, in_dim: int, dtype: torch.dtype) -> None:
    weight, x, stage = torch.randn(out_dim, in_dim).to(dtype), torch.randn(11, in_dim), Stage()
    stage.give(stage.linear(stage.take(in_dim), pack(weight)), torch.float32)
    [ours] = stage([x])
    words = x if dtype == torch.float32 else x.bfloat16()
    is_half = dtype == torch.bfloat16 and native.kernels() == "avx512_bf16"
    exact = (words if is_half else x).double() @ weight.double().T
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-4)


def test_experts_are_chosen_as_torch_chooses_them() -> None:
    """Ties go to the lowest place; a group with better pairs wins; NaN is seen."""
    moe = model("v32").layers[1].experts
    assert moe is not None
    c = model("v32").config
    logits = torch.randn(64, c.expert_count).mul(2).round()
    stage = Stage()
    taken, normed, total = stage.take(c.expert_count), stage.take(8), stage.take(8)
    up = torch.zeros(c.expert_count, 2 * 8, 8)
    up[:, :8] = 1.0
    up[:, 8:] = 1.0
    down = torch.zeros(c.expert_count, 8, 8)
    down[:, 0, 0] = 2.0 ** torch.arange(c.expert_count)
    routing = Routing(4, 4, 2, False, 1.0, torch.zeros(c.expert_count))
    stage.experts(normed, taken, routing, pack(up), pack(down), total)
    stage.give(total, torch.float32)
    ones = torch.full((64, 8), 0.125)
    [ours] = stage([logits, ones, torch.zeros(64, 8)])
    scores = logits.sigmoid()
    kept = moe._limit_groups(scores)
    chosen = _best(kept, 4)
    unit = 1.0 * torch.sigmoid(torch.tensor(1.0))
    wanted = (scores.gather(1, chosen) * 2.0**chosen * unit).sum(1)
    torch.testing.assert_close(ours[:, 0], wanted, rtol=1e-5, atol=0)


def test_what_does_not_fit_is_refused() -> None:
    layer, (hidden, attended, rotation) = model("v32").layers[1], inputs("v32", 5)
    compiled = layer.compiled(layout("v32", "f32"))
    with pytest.raises(BadInput, match="5 x 256 float32"):
        compiled.back(hidden[:, :-1], attended)
    with pytest.raises(BadInput, match="5 x 4096"):
        compiled.back(hidden, attended[:4])
    with pytest.raises(BadInput, match="float64"):
        compiled.back(hidden.double(), attended)
    with pytest.raises(BadInput, match="rotation"):
        compiled.front(hidden, rotation.part(slice(4)))
    with pytest.raises(BadInput, match="int8"):
        pack(torch.zeros(4, 4, dtype=torch.int8))
    with pytest.raises(BadInput, match="power of two"):
        Stage().hadamard(Heads(Stage().room(12), 1, 0))
    stage = Stage()
    with pytest.raises(BadInput, match="16 registers"):
        [stage.room(1) for _ in range(17)]
    stage, few = Stage(), Routing(1, 2, 1, False, 1.0, torch.zeros(3))
    value = stage.take(8)
    with pytest.raises(BadInput, match="3 experts in 2 groups"):
        stage.experts(
            value, value, few, pack(torch.zeros(3, 16, 8)), pack(torch.zeros(3, 8, 8)), value
        )
    stage.give(value, torch.bfloat16)
    with pytest.raises(BadInput, match=r"a result has shape \(4, 8\), must be \(5, 8\)"):
        stage.bind([torch.zeros(5, 8)], [torch.zeros(4, 8, dtype=torch.bfloat16)])
    with pytest.raises(BadInput, match="a result has type"):
        stage.bind([torch.zeros(5, 8)], [torch.zeros(5, 8)])


def test_both_backends_say_whether_they_have_stages() -> None:
    assert cpu.has_stages()
    assert not reference.has_stages()
