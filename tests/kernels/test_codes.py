"""Products with weights that stay codes: against float64, in every set; bits that nothing moves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ess.errors import BadInput
from ess.kernels.cpu import native
from ess.kernels.cpu.codes import GROUP_INPUTS, Bits, CodedWeight
from ess.kernels.cpu.stage import Heads, Panels, Stage, has_half, pack, pack_codes
from tests.support.built import needs_native

pytestmark = needs_native

SHAPES = [(1, 32), (16, 64), (17, 96), (65, 32), (48, 160), (200, 576)]
COUNTS = (1, 2, 3, 7, 8, 9, 33, 70)
HALVES = [False, True] if native.available() and has_half() else [False]


def drawn(bits: Bits, out_dim: int, in_dim: int) -> CodedWeight:
    random = torch.Generator().manual_seed(out_dim * in_dim + bits)
    codes = torch.randint(0, 256, (out_dim, in_dim * bits // 8), generator=random)
    steps = torch.randn(out_dim, in_dim // GROUP_INPUTS, 2, generator=random)
    steps[..., 0] /= 2 ** (bits - 1)
    steps[0, 0] = torch.tensor([6e-8, -3e-5])  # subnormal in float16
    return CodedWeight(codes.to(torch.uint8), steps.half(), bits)


def by_stage(panels: Panels, values: Tensor, factor: float = 1.0, threads: int = 1) -> Tensor:
    stage = Stage()
    stage.give(stage.linear(stage.take(values.shape[1]), panels, factor=factor), torch.float32)
    [made] = stage([values], threads=threads)
    return made


def inputs(count: int, dim: int) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(count))


def test_codes_are_the_numbers_that_they_say() -> None:
    codes = torch.tensor([[0x10, 0xF2] + [0] * 14], dtype=torch.uint8)
    four = CodedWeight(codes, torch.tensor([[[0.5, -4.0]]]).half(), 4)
    assert four.exact()[0, :5].tolist() == [-4.0, -3.5, -3.0, 3.5, -4.0]
    eight = CodedWeight(codes.repeat(1, 2), torch.tensor([[[2.0, 0.0]]]).half(), 8)
    assert eight.exact()[0, :3].tolist() == [32.0, -28.0, 0.0]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_that_of_the_exact_weights(shape: tuple[int, int], bits: Bits, half: bool):
    weight = drawn(bits, *shape)
    panels = pack_codes(weight, half=half)
    for count in COUNTS:
        given = inputs(count, shape[1])
        seen = given.bfloat16() if half else given
        wanted = seen.double() @ weight.exact().double().T * 0.5
        size = seen.double().abs() @ weight.exact().double().abs().T
        made = by_stage(panels, given, factor=0.5)
        assert made.shape == wanted.shape
        assert ((made - wanted).abs() <= 4e-6 * size + 1e-6).all()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("bits", [4, 8])
def test_bits_do_not_depend_on_the_others(bits: Bits, half: bool) -> None:
    """Few tokens look codes up, many have them written out; poison beside a token stays there."""
    panels = pack_codes(drawn(bits, 107, 96), half=half)
    given = inputs(70, 96)
    given[0] *= 1e-38  # products with tiles take what is subnormal as zero
    given[2] *= 1e35
    whole = by_stage(panels, given)
    for count in COUNTS:
        assert torch.equal(by_stage(panels, given[:count]), whole[:count])
        assert torch.equal(by_stage(panels, given[:count], threads=3), whole[:count])
    spoilt = given.clone()
    spoilt[1::2] = torch.nan
    made = by_stage(panels, spoilt)
    assert torch.equal(made[::2], whole[::2])
    assert made[1::2].isnan().all()
    for _ in range(20):
        assert torch.equal(by_stage(panels, given), whole)


@pytest.mark.parametrize("bits", [4, 8])
def test_nothing_beside_the_result_is_written(bits: Bits) -> None:
    weight, stage = drawn(bits, 21, 64), Stage()
    taken, room = stage.take(64), stage.room(40)
    filled = stage.linear(taken, pack(torch.full((40, 64), torch.nan)))
    stage.copy(Heads(filled, 1, 0), Heads(room, 1, 0))
    stage.linear_into(taken, pack(weight), room.part(9, 21))
    stage.give(room, torch.float32)
    for count in (1, 9):
        given = inputs(count, 64)
        [made] = stage([given])
        assert made[:, :9].isnan().all()
        assert made[:, 30:].isnan().all()
        assert torch.equal(made[:, 9:30], by_stage(pack(weight), given))


def test_inputs_that_are_not_dense_or_not_float32() -> None:
    panels = pack(drawn(4, 33, 64))
    wide = torch.full((5, 128), torch.nan)
    wide[:, ::2] = inputs(5, 64)
    assert torch.equal(by_stage(panels, wide[:, ::2]), by_stage(panels, wide[:, ::2].clone()))
    rounded = inputs(5, 64).bfloat16()
    assert torch.equal(by_stage(panels, rounded), by_stage(panels, rounded.float()))


WRONG = {
    "a part of a group": ((3, 20), (3, 1, 2), 1.0, "whole groups of 32"),
    "steps of another shape": ((3, 16), (3, 2, 2), 1.0, "3 x 32 weights need steps"),
    "a scale that is no number": ((3, 16), (3, 1, 2), torch.nan, "not finite"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_codes_is_refused(what: str) -> None:
    codes, steps, value, says = WRONG[what]
    with pytest.raises(BadInput, match=says):
        CodedWeight(torch.zeros(codes, dtype=torch.uint8), torch.full(steps, value).half(), 4)
