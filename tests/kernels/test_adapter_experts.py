"""DeepGEMM's products of experts, against a stand-in with its limits and its rounding."""

from __future__ import annotations

import math
import sys
import types
from typing import Any

import pytest
import torch

from ess.errors import BadInput, Unavailable
from ess.kernels.cuda.adapters import choice, deep_gemm_experts
from tests.kernels import test_grouped
from tests.kernels.sets import reference

CPU = torch.device("cpu")


class StandIn:
    """Behind an expert's tokens it leaves garbage; `wrong` breaks one of its answers."""

    __version__ = "2.8"

    def __init__(self, *, wrong: str = "") -> None:
        self.wrong = wrong

    def m_grouped_fp8_gemm_nt_masked(
        self, a: Any, b: Any, d: torch.Tensor, masked_m: torch.Tensor, expected_m: int
    ) -> None:
        (tokens, token_scales), (weights, scales) = a, b
        groups, room, depth = tokens.shape
        width = weights.shape[1]
        assert tokens.dtype == weights.dtype == torch.float8_e4m3fn
        assert token_scales.shape == (groups, room, depth // 128), "scales of the tokens"
        assert scales.shape == (groups, -(-width // 128), depth // 128)
        assert token_scales.dtype == scales.dtype == torch.float32
        assert all(each.is_contiguous() for each in (tokens, token_scales, weights, d, masked_m))
        assert (d.shape, d.dtype) == ((groups, room, width), torch.bfloat16)
        assert (masked_m.shape, masked_m.dtype) == ((groups,), torch.int32)
        assert expected_m > 0
        d.fill_(math.nan)
        for group, count in enumerate(masked_m.tolist()):
            plain = tokens[group, :count].float()
            plain = plain * token_scales[group, :count].repeat_interleave(128, 1)
            factors = (
                scales[group].log2().ceil().exp2() if self.wrong == "scales" else scales[group]
            )
            ends = torch.tensor([count], dtype=torch.int32)
            one = weights[group : group + 1]
            d[group, :count] = reference.expert_products(plain, ends, one, scales=factors[None])
        if self.wrong == "places":
            d.copy_(d.roll(1, 1))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(name: str, stand_in: StandIn) -> None:
        module = types.ModuleType(name)
        function = stand_in.m_grouped_fp8_gemm_nt_masked
        members = {"__version__": stand_in.__version__, function.__name__: function}
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)

    return put


def case_of(counts: list[int], token: torch.dtype, **sizes: int) -> test_grouped.Case:
    return test_grouped.make(
        counts, token, test_grouped.FP8, **{"width": 192, "depth": 256} | sizes
    )


def run(adapter: deep_gemm_experts.DeepGemmExperts, case: test_grouped.Case) -> torch.Tensor:
    assert case.scales is not None
    given = case.tokens, case.ends, case.weights
    return adapter.expert_products(*given, scales=case.scales, out=case.out)


@pytest.mark.parametrize("token", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[0, 3, 0, 300, 1], [4], [0, 0]], ids=str)
def test_it_is_the_reference_but_for_the_codes_of_tokens(
    install: Any, token: torch.dtype, counts: list[int]
) -> None:
    """An e4m3 is within 2^-4 of its number, or of the least step under its scale."""
    install("deep_gemm", StandIn())
    adapter = deep_gemm_experts.load(CPU)
    assert adapter.line.startswith("deep_gemm 2.8, tokens rounded to e4m3, for weights in e4m3 of")
    case = case_of(counts, token)
    assert run(adapter, case) is case.out
    want = torch.from_numpy(test_grouped.by_loop(case))
    sizes = case._replace(
        tokens=case.tokens.abs(),
        weights=(case.weights.view(torch.uint8) & 0x7F).view(test_grouped.FP8),
        out=torch.zeros(case.out.shape),
    )
    within = torch.from_numpy(test_grouped.by_loop(sizes)) * (2**-4 + 2**-8)
    count = sum(counts)
    assert torch.all((case.out.double() - want).abs()[:count] <= within[:count])
    assert (case.out[count:] == test_grouped.POISON).all()
    if count:
        error = (case.out.double() - want).abs()[:count] / want.abs().mean()
        assert 1e-4 < float(error.mean()) < 0.04


def test_tokens_that_codes_hold_are_exact(install: Any) -> None:
    install("deep_gemm", StandIn())
    adapter = deep_gemm_experts.load(CPU)
    case = case_of([3, 0, 2], torch.bfloat16)
    case.tokens[:5] = (case.tokens[:5] * 2).round().clamp(-4, 4)
    ours = run(adapter, case).clone()
    want = case._replace(out=torch.full(ours.shape, test_grouped.POISON).bfloat16()).run(reference)
    assert torch.equal(ours, want)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [("scales", r"products are wrong by 0\.\d+, due 0.0078125"), ("places", "wrong by nan")],
)
def test_a_build_that_fails_the_probe_is_refused(install: Any, wrong: str, says: str) -> None:
    install("deep_gemm", StandIn(wrong=wrong))
    with pytest.raises(Unavailable, match=f"deep_gemm: the probe failed: .*{says}"):
        deep_gemm_experts.load(CPU, names=["deep_gemm"])
    chosen = choice.choose(CPU)
    assert chosen.experts is None
    assert chosen.lines[2].startswith("experts: triton (deep_gemm: the probe failed")


def test_an_older_build_is_refused_by_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", types.ModuleType("deep_gemm"))
    with pytest.raises(Unavailable, match="deep_gemm: it has neither m_grouped_fp8_gemm_nt_masked"):
        deep_gemm_experts.load(CPU, names=["deep_gemm"])


def test_bad_input_changes_nothing(install: Any) -> None:
    install("deep_gemm", StandIn())
    adapter = deep_gemm_experts.load(CPU)
    for case, says in (
        (case_of([2], torch.bfloat16, depth=200), "192 x 200: DeepGEMM takes multiples of 64 and"),
        (case_of([2], torch.bfloat16, width=100), "weights of 100 x 256"),
        (case_of([2], torch.bfloat16)._replace(ends=torch.ones(1)), "ends has type torch.float32"),
    ):
        with pytest.raises(BadInput, match=says):
            run(adapter, case)
        assert (case.out == test_grouped.POISON).all()
    monstrous = case_of([2], torch.bfloat16)
    tokens = monstrous.tokens[:1].expand(3 << 20, -1)
    with pytest.raises(BadInput, match="3145728 tokens for 1 experts take 1207959552 bytes"):
        adapter.expert_products(tokens, monstrous.ends, monstrous.weights, scales=monstrous.scales)
    none = monstrous._replace(tokens=monstrous.tokens[:0], out=monstrous.out[:0])
    assert run(adapter, none).shape == (0, 192)
