"""The narrow floats against their definitions and against torch's casts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ess.kernels.reference import formats
from tests.kernels.bits import all_bf16, array, random_bits, same_values, torch_code

# ---- the floats themselves ----


def test_every_code_decodes_as_torch_decodes_it() -> None:
    codes = np.arange(256, dtype=np.uint8)
    theirs = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    same_values(torch.from_numpy(formats.e4m3_decode(codes)), theirs)


def test_every_code_encodes_to_itself() -> None:
    codes = np.arange(256, dtype=np.uint8)
    assert np.array_equal(formats.e4m3_encode(formats.e4m3_decode(codes)), codes)


def check_encode(values: torch.Tensor) -> None:
    """Equal to torch up to 464; beyond, torch clamps or gives NaN by its version, we give NaN."""
    ours, theirs = formats.e4m3_encode(values.float().numpy()), torch_code(values)
    reachable = (values.float().abs() <= 464).numpy() | values.isnan().numpy()
    assert np.array_equal(ours[reachable], theirs[reachable])
    assert np.all(ours[~reachable] & 0x7F == 0x7F)
    assert np.array_equal(ours & 0x80, theirs & 0x80)
    assert np.isin(theirs[~reachable] & 0x7F, (0x7E, 0x7F)).all()


def test_every_bf16_encodes_as_torch_encodes_it() -> None:
    check_encode(all_bf16())


def test_random_float_bits_encode_as_torch_encodes_them() -> None:
    check_encode(torch.from_numpy(random_bits(1, 1_000_000)))


def test_every_midpoint_and_its_neighbours_encode_as_torch_encodes_them() -> None:
    magnitudes = formats.e4m3_decode(np.arange(127, dtype=np.uint8))
    middle = np.append((magnitudes[1:] + magnitudes[:-1]) / 2, np.float32(464))
    near = [middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))]
    check_encode(torch.from_numpy(np.concatenate(near + [-part for part in near])))


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (448.0, 0x7E),
        (464.0, 0x7E),
        (np.nextafter(np.float32(464), np.float32(465)), 0x7F),
        (480.0, 0x7F),
        (np.inf, 0x7F),
        (np.nan, 0x7F),
        (2**-9, 0x01),
        (2**-10, 0x00),
        (3 * 2**-10, 0x02),
        (2**-6, 0x08),
        (0.0, 0x00),
    ],
)
def test_named_values_have_their_codes(value: float, code: int) -> None:
    signed = np.array([value, np.copysign(value, -1)], np.float32)
    assert formats.e4m3_encode(signed).tolist() == [code, code | 0x80]


def test_bf16_rounds_as_torch_rounds() -> None:
    values = torch.from_numpy(random_bits(2, 1_000_000))
    theirs = values.to(torch.bfloat16)
    ours = torch.from_numpy(formats.bf16_round(values.numpy()).view(np.int16))
    assert torch.equal(ours[values.isnan()], torch.full_like(ours, 0x7FC0)[values.isnan()])
    same_values(ours.view(torch.bfloat16), theirs)


def test_bf16_widens_exactly() -> None:
    values = all_bf16()
    same_values(torch.from_numpy(formats.bf16_widen(array(values))), values.float())


@pytest.mark.parametrize("steps", range(-3, 4))
@pytest.mark.parametrize("exponent", [-120, -60, -7, -1, 0, 1, 8, 61, 120])
def test_scale_is_the_least_power_of_two_that_fits(exponent: int, steps: int) -> None:
    amax = np.ldexp(np.full(1, 448, np.float32), exponent - 6)
    amax = (amax.view(np.int32) + np.int32(steps)).view(np.float32)
    (scale,) = formats.group_scales(amax, power_of_two=True)
    assert np.frexp(scale)[0] == 0.5
    assert 224 < max(amax[0], np.float32(1e-4)) / float(scale) <= 448
