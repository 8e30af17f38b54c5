"""Dense products in fp8 and whole experts, in every set of ops, against the sums themselves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ess.errors import BadInput
from ess.kernels import experts as routed
from ess.kernels.ops import Ops
from ess.kernels.reference import formats
from tests.kernels.sets import SETS, op_set

FP8 = torch.float8_e4m3fn


@pytest.fixture(params=SETS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return op_set(request.param)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    *lead, width, depth = shape
    blocks = *lead, -(-width // 128), -(-depth // 128)
    scales = torch.rand(blocks, generator=torch.Generator().manual_seed(seed)) + 0.1
    return drawn(*shape, seed=seed).to(FP8), scales


def plain(codes: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    whole = np.kron(scales.double().numpy(), np.ones((128, 128)))
    return codes.double().numpy() * whole[..., : codes.shape[-2], : codes.shape[-1]]


def rounded(values: torch.Tensor) -> np.ndarray:
    """What the values are under their scales, by the specification of the formats."""
    depth = values.shape[1]
    padded = np.pad(values.float().numpy(), ((0, 0), (0, -depth % 128)))
    codes, scales = formats.encode_groups(padded.reshape(len(values), -1, 128), power_of_two=False)
    whole = formats.e4m3_decode(codes).astype(np.float64) * scales[..., None]
    return whole.reshape(padded.shape)[:, :depth]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("count", "width", "depth"), [(1, 128, 256), (5, 130, 384), (16, 64, 200), (70, 40, 136)]
)
def test_products_of_codes(
    ops: Ops, dtype: torch.dtype, count: int, width: int, depth: int
) -> None:
    """Sums of 128 products may be added in less than float32, as tensor cores do: 2^-12 of their
    sizes. Reading the values themselves, or another block's scale, is far beyond."""
    values = drawn(count, depth, seed=1).to(dtype) * torch.arange(1, depth + 1)
    values = values.to(dtype)
    codes, scales = weights(width, depth, seed=2)
    exact, terms = plain(codes, scales), rounded(values)
    want, sizes = terms @ exact.T, np.abs(terms) @ np.abs(exact).T
    ours = ops.linear_fp8(values, codes, scales)
    assert ours.dtype == torch.float32
    assert (np.abs(ours.double().numpy() - want) <= 2.0**-12 * sizes).all()
    unrounded = values.double().numpy() @ exact.T
    assert (np.abs(unrounded - want) > 2.0**-12 * sizes).any()
    out = torch.full((count, width + 3), 7.0, dtype=torch.bfloat16)[:, :width]
    assert ops.linear_fp8(values, codes, scales, out=out) is out
    assert (np.abs(out.double().numpy() - want) <= 2.0**-12 * sizes + 2.0**-8 * np.abs(want)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depth", [256, 200])
def test_values_may_lie_within_wider_lines(ops: Ops, dtype: torch.dtype, depth: int) -> None:
    """As a low-rank query lies beside a new row; what is beside is not read."""
    wide = torch.full((5, depth + 40), math.nan, dtype=dtype)
    values = wide[:, 17 : 17 + depth]
    values.copy_(drawn(5, depth, seed=3))
    codes, scales = weights(130, depth, seed=2)
    ours = ops.linear_fp8(values, codes, scales)
    assert torch.equal(ours, ops.linear_fp8(values.contiguous(), codes, scales))
    assert ours.isfinite().all()


def test_a_token_does_not_depend_on_its_neighbours(ops: Ops) -> None:
    values, (codes, scales) = drawn(20, 256, seed=1), weights(130, 256, seed=2)
    whole = ops.linear_fp8(values, codes, scales)
    spoilt = values.clone()
    spoilt[3] = math.nan
    ours = ops.linear_fp8(spoilt, codes, scales)
    kept = torch.arange(20) != 3
    assert torch.equal(ours[kept], whole[kept])
    assert ours[3].isnan().all()
    assert ops.linear_fp8(values[:0], codes, scales).shape == (0, 130)


def test_bad_input_changes_nothing(ops: Ops) -> None:
    values, (codes, scales) = drawn(3, 256, seed=1), weights(130, 256, seed=2)
    out = torch.full((3, 130), 7.0)
    for given, says in (
        ((values.double(), codes, scales), "values has type torch.float64"),
        ((values[:, :9], codes, scales), r"weights has shape \(130, 256\)"),
        ((values, codes.float(), scales), "weights has type torch.float32"),
        ((values, codes, scales[:1]), r"scales has shape \(1, 2\), must be \(2, 2\)"),
        ((values[:, :0], codes[:, :0], scales[:, :0]), "have no depth"),
    ):
        with pytest.raises(BadInput, match=says):
            ops.linear_fp8(*given, out=out)
    with pytest.raises(BadInput, match=r"out has shape \(3, 9\)"):
        ops.linear_fp8(values, codes, scales, out=out[:, :9])
    assert (out == 7).all()


@pytest.mark.parametrize("is_fp8", [False, True])
def test_experts_by_the_loop(ops: Ops, is_fp8: bool) -> None:
    """Experts without a token, one that all tokens choose; each token in float64."""
    count, experts, depth, inner = 9, 6, 72, 40
    tokens = drawn(count, depth, seed=1)
    tokens = tokens.bfloat16() if is_fp8 else tokens
    others = torch.tensor([[0, 3], [1, 3], [3, 5]])[torch.arange(count) % 3]
    share = drawn(count, 2, seed=2).sigmoid()
    if is_fp8:
        (first, first_scales), (second, second_scales) = (
            weights(experts, 2 * inner, depth, seed=3),
            weights(experts, depth, inner, seed=4),
        )
        exact = [plain(first[e], first_scales[e]) for e in range(experts)]
        last = [plain(second[e], second_scales[e]) for e in range(experts)]
    else:
        first, second = (
            drawn(experts, 2 * inner, depth, seed=3),
            drawn(experts, depth, inner, seed=4),
        )
        exact, last = [*first.double().numpy()], [*second.double().numpy()]
        first_scales = second_scales = None
    want = np.zeros((count, depth))
    for token in range(count):
        for expert, part in zip(others[token].tolist(), share[token].tolist(), strict=True):
            gate, up = np.split(exact[expert] @ tokens[token].double().numpy(), 2)
            want[token] += part * (last[expert] @ (gate / (1 + np.exp(-gate)) * up))
    scaled = (first, first_scales), (second, second_scales)
    ours = routed.experts(ops.expert_products, tokens, others, share, *scaled)
    assert ours.dtype == torch.float32
    bound = 2**-6 if is_fp8 else 2**-18
    assert np.abs(ours.double().numpy() - want).max() <= bound * np.abs(want).max()
