"""DeepGEMM's dense products, against a stand-in with its limits and its rounding."""

from __future__ import annotations

import functools
import math
import sys
import types
from typing import Any

import pytest
import torch

from ess.errors import BadInput, Unavailable
from ess.kernels.cuda.adapters import choice, deep_gemm_linear
from ess.units import div_ceil
from tests.kernels.sets import reference
from tests.support.deep_gemm_layouts import VERSIONS, Choose, Layout

CPU = torch.device("cpu")


class StandIn:
    """`rounds` takes scales of weights for powers of two."""

    __version__ = "2.8"

    def __init__(self, *, rounds: bool = False) -> None:
        self.rounds = rounds

    def fp8_gemm_nt(self, a: Any, b: Any, d: torch.Tensor) -> None:
        (values, value_scales), (weights, scales) = a, b
        count, depth = values.shape
        width = len(weights)
        assert values.dtype == weights.dtype == torch.float8_e4m3fn
        assert value_scales.shape == (count, depth // 128)
        assert scales.shape == (math.ceil(width / 128), depth // 128)
        assert value_scales.dtype == scales.dtype == torch.float32
        assert (d.shape, d.dtype) == ((count, width), torch.bfloat16)
        assert all(part.is_contiguous() for part in (values, value_scales, weights, scales, d))
        plain = values.float() * value_scales.repeat_interleave(128, 1)
        factors = scales.log2().ceil().exp2() if self.rounds else scales
        ends = torch.tensor([count], dtype=torch.int32)
        d.copy_(reference.expert_products(plain, ends, weights[None], scales=factors[None]))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(stand_in: StandIn) -> None:
        module = types.ModuleType("deep_gemm")
        vars(module).update(__version__="2.8", fp8_gemm_nt=stand_in.fp8_gemm_nt)
        monkeypatch.setitem(sys.modules, "deep_gemm", module)

    return put


def given(count: int, width: int = 192, depth: int = 256) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(count, depth, generator=generator)
    weights = torch.randn(width, depth, generator=generator).to(torch.float8_e4m3fn)
    return values, weights, torch.rand(math.ceil(width / 128), depth // 128, generator=generator)


@pytest.mark.parametrize("count", [0, 1, 70])
def test_it_is_our_own_product_but_for_the_rounding_of_the_result(install: Any, count: int) -> None:
    install(StandIn())
    adapter = deep_gemm_linear.load(CPU)
    assert adapter.line == "deep_gemm 2.8, for weights of 64 x 128 and multiples; else triton"
    asked = given(count)
    want = reference.linear_fp8(*asked)
    torch.testing.assert_close(adapter.linear_fp8(*asked), want, rtol=2**-8, atol=1e-5)
    out = torch.full((count, 192), 7.0)
    assert adapter.linear_fp8(*asked, out=out) is out
    torch.testing.assert_close(out, want, rtol=2**-8, atol=1e-5)


def test_a_build_that_rounds_scales_is_refused(install: Any) -> None:
    install(StandIn(rounds=True))
    with pytest.raises(Unavailable, match="deep_gemm: the probe failed: products are wrong by"):
        deep_gemm_linear.load(CPU, names=["deep_gemm"])
    chosen = choice.choose(CPU)
    assert chosen.dense is None
    assert chosen.lines[3].startswith("dense: triton (deep_gemm: the probe failed")


def test_other_sizes_are_refused(install: Any) -> None:
    install(StandIn())
    adapter = deep_gemm_linear.load(CPU)
    with pytest.raises(BadInput, match="weights of 100 x 256: DeepGEMM takes multiples of 64"):
        adapter.linear_fp8(*given(2, width=100))


SHAPES = ((24576, 1536), (2112, 7168), (7168, 16384), (4096, 7168), (7168, 2048), (64, 128))
"""Of DeepSeek-V3.2, and the smallest."""
COUNTS = (1, 15, 16, 17, 64, 65, 511, 700, 1100)


@functools.cache
def choices(choose: Choose, width: int, depth: int) -> list[Layout]:
    """For 1 token, for 2 and so on."""
    return [choose(count, width, depth) for count in range(1, COUNTS[-1] + 1)]


@pytest.mark.parametrize("choose", VERSIONS)
@pytest.mark.parametrize("count_max", COUNTS)
def test_the_counts_to_build_meet_every_layout(choose: Choose, count_max: int) -> None:
    counts = deep_gemm_linear.counts_to_build(count_max)
    assert counts[-1] == count_max
    assert len(counts) <= 8 + div_ceil(count_max, 64)
    for width, depth in SHAPES:
        made = choices(choose, width, depth)
        assert {made[count - 1] for count in counts} == set(made[:count_max])


def test_layouts_follow_from_the_number_of_tokens() -> None:
    """Else the test above could not fail."""
    for choose in VERSIONS:
        assert len({choose(count, 2112, 7168) for count in (1, 64, 128, 512, 2048)}) > 2
