"""Ops that hand a call to another library where it takes it, and to our own where it does not."""

from __future__ import annotations

import math
import types
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ess.kernels.cuda.adapters import choice
from ess.kernels.cuda.adapters.joined import joined
from ess.kernels.ops import Ops
from ess.kernels.reference import ops as truth
from ess.layout import IndexCodec, RowCodec
from tests.kernels import test_adapter_experts, test_adapter_linear, test_adapters
from tests.kernels.sets import reference
from tests.kernels.test_adapters import CPU, DeepGemmStandIn, FlashMlaStandIn, install, whole_case

__all__ = ["install"]


ASKED = (
    *("attend", "merge", "index_scored", "index_top_k", "top_k"),
    *("linear_fp8", "expert_products"),
)


@dataclass
class Counted:
    """Our own kernels, for the reference: calls by name."""

    names: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        function = getattr(truth, name)
        if name not in ASKED:
            return function

        def call(*given: Any, **options: Any) -> Any:
            self.names.append(name)
            return function(*given, **options)

        return call


class DeepGemmWhole(DeepGemmStandIn):
    """All that DeepGEMM has."""

    def __init__(self, *, wrong: str = "") -> None:
        super().__init__()
        self.fp8_gemm_nt = test_adapter_linear.StandIn(rounds=wrong == "linear").fp8_gemm_nt
        grouped = test_adapter_experts.StandIn(wrong="scales" if wrong == "experts" else "")
        self.m_grouped_fp8_gemm_nt_masked = grouped.m_grouped_fp8_gemm_nt_masked


MADE = ("fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata", "get_num_sms", "fp8_gemm_nt")
FLASH = ("get_mla_metadata", "flash_mla_with_kvcache")


@pytest.fixture
def made(install: Any) -> Any:
    """Ops over stand-ins, and what our own kernels were asked to do."""

    def make(*, attention_is_wrong: str = "", products_are_wrong: str = "") -> tuple[Ops, Counted]:
        flash = FlashMlaStandIn(wrong=attention_is_wrong)
        gemm = DeepGemmWhole(wrong=products_are_wrong)
        install("flash_mla", **{name: getattr(flash, name) for name in FLASH})
        named = (*MADE, "m_grouped_fp8_gemm_nt_masked")
        install("deep_gemm", **{name: getattr(gemm, name) for name in named})
        ours = Counted()
        own = Ops("ours", ours)  # type: ignore[arg-type]
        ops = Ops("joined", joined(own, choice.choose(CPU)))
        ours.names.clear()
        return ops, ours

    return make


def attended(ops: Ops, case: Any, **options: Any) -> Any:
    given = {"scale": case.scale, "placed": case.placed, "balanced": True, "whole": True} | options
    return ops.attend(case.queries, case.rows, case.slots, RowCodec(), **given)


def near(ours: Any, want: Any) -> None:
    torch.testing.assert_close(ours.out, want.out, atol=8e-3, rtol=8e-3)
    torch.testing.assert_close(ours.lse, want.lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [5, 128])
def test_whole_lists_are_the_library_s(made: Any, heads: int) -> None:
    ops, ours = made()
    case = whole_case(heads)
    near(attended(ops, case, placed=None), attended(reference, case, placed=None))
    assert ours.names == []


def test_rows_in_place_are_ours_and_the_parts_are_merged(made: Any) -> None:
    ops, ours = made()
    case = whole_case(64)
    alone = attended(ops, case, placed=None)
    beside = attended(ops, case)
    assert ours.names == ["attend", "merge"]
    assert torch.equal(alone.out, beside.out)
    assert torch.equal(alone.lse, beside.lse)
    case.slots[0, ::3] = -2 - torch.arange(len(case.slots[0, ::3]), dtype=torch.int32)
    case.slots[2] = -2 - torch.arange(case.slots.shape[1], dtype=torch.int32)
    case.placed = case.rows[: case.slots.shape[1]].flip(0).contiguous()
    near(attended(ops, case), attended(reference, case))


KEPT = {
    "a part of a list": {"whole": False},
    "bits that may not follow from the batch": {"balanced": False},
}


@pytest.mark.parametrize("options", KEPT.values(), ids=KEPT)
def test_what_flash_mla_may_not_serve_is_ours(made: Any, options: dict[str, bool]) -> None:
    ops, ours = made()
    case = whole_case(5)
    near(attended(ops, case, **options), attended(reference, case, **options))
    assert ours.names == ["attend"]


def test_what_is_added_to_a_partial_is_ours(made: Any) -> None:
    ops, ours = made()
    case = whole_case(5)
    into, held = (attended(reference, case) for _ in range(2))
    near(attended(ops, case, into=into, adds=True), held._replace(lse=held.lse + math.log(2)))
    assert ours.names == ["attend"]


def test_shapes_that_flash_mla_does_not_take_are_ours(made: Any) -> None:
    ops, ours = made()
    case = whole_case(5)
    for change in (
        {"queries": case.queries.float()},
        {"queries": case.queries.repeat(1, 30, 1)},
        {"rows": case.rows[:570]},
    ):
        other = types.SimpleNamespace(**vars(case) | change)
        other.slots = case.slots.clamp(max=569)
        near(attended(ops, other, placed=None), attended(reference, other, placed=None))
    assert ours.names == ["attend"] * 3


def index_case(heads: int, each: int) -> dict[str, Any]:
    case: dict[str, Any] = test_adapters.index_case(3, each)
    generator = torch.Generator().manual_seed(heads)
    case["queries"] = torch.randn(3 * each, heads, 128, generator=generator).bfloat16()
    case["weights"] = torch.randn(3 * each, heads, generator=generator)
    return case


@pytest.mark.parametrize(("heads", "each"), [(64, 1), (32, 2), (64, 4)])
def test_index_logits_are_the_library_s(made: Any, heads: int, each: int) -> None:
    """Over queries rounded to e4m3, a scale for each: what the reference says of the same codes."""
    ops, ours = made()
    case, codec = index_case(heads, each), IndexCodec(head_count=heads)
    chosen = ops.index_top_k(**case, codec=codec, k=9, queries_per_request=each)
    assert ours.names == ["top_k"]
    keys = reference.encode_keys(case["queries"].reshape(-1, 128), codec)
    codes = keys.values.view(torch.float8_e4m3fn).view(case["queries"].shape)
    weights = case["weights"] * keys.scales.view(-1, heads)
    logits = reference.index_logits(**case | {"queries": codes, "weights": weights}, codec=codec)
    assert torch.equal(chosen, reference.top_k(logits, case["lengths"], k=9))
    again, scores = ops.index_scored(**case, codec=codec, k=9, queries_per_request=each)
    assert torch.equal(again, chosen)
    assert scores.is_contiguous()
    assert torch.equal(reference.top_k(scores, case["lengths"], k=9), chosen)
    torch.testing.assert_close(scores[:, :256].where(logits > -math.inf, logits), logits)


def test_other_heads_and_keys_are_ours(made: Any) -> None:
    ops, ours = made()
    case = index_case(8, 1)
    chosen = ops.index_top_k(**case, codec=IndexCodec(head_count=8), k=9)
    assert ours.names == ["index_top_k"]
    assert torch.equal(chosen, reference.index_top_k(**case, codec=IndexCodec(head_count=8), k=9))
    again, _ = ops.index_scored(**case, codec=IndexCodec(head_count=8), k=9)
    assert ours.names == ["index_top_k", "index_scored"]
    assert torch.equal(again, chosen)


@pytest.mark.parametrize(("width", "is_theirs"), [(192, True), (100, False)])
def test_dense_products(made: Any, width: int, is_theirs: bool) -> None:
    ops, ours = made()
    given = test_adapter_linear.given(3, width=width)
    want = reference.linear_fp8(*given)
    torch.testing.assert_close(ops.linear_fp8(*given), want, rtol=2**-8, atol=1e-5)
    assert ours.names == ([] if is_theirs else ["linear_fp8"])


def expert_case() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randn(7, 256, generator=generator)
    weights = torch.randn(3, 192, 256, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, 2, generator=generator) + 0.5
    return tokens, torch.tensor([2, 2, 7], dtype=torch.int32), weights, scales


def test_products_of_experts(made: Any) -> None:
    """Split ones, and plain weights, are ours."""
    ops, ours = made()
    tokens, ends, weights, scales = expert_case()
    want = reference.expert_products(tokens, ends, weights, scales=scales)
    made_by = ops.expert_products(tokens, ends, weights, scales=scales)
    assert ours.names == []
    assert float((made_by - want).norm() / want.norm()) < 0.05
    begin = torch.tensor([1], dtype=torch.int32)
    out = torch.zeros_like(want)
    ops.expert_products(tokens, ends, weights, scales=scales, begin=begin, out=out)
    torch.testing.assert_close(out[1:], want[1:])
    ops.expert_products(tokens, ends, weights.float())
    assert ours.names == ["expert_products"] * 2


WRONG = {
    "attention": {"attention_is_wrong": "lse"},
    "dense": {"products_are_wrong": "linear"},
    "experts": {"products_are_wrong": "experts"},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_library_that_computes_wrong_is_not_asked(made: Any, what: str) -> None:
    ops, ours = made(**WRONG[what])
    case, given = whole_case(5), test_adapter_linear.given(3)
    near(attended(ops, case, placed=None), attended(reference, case, placed=None))
    ops.linear_fp8(*given)
    tokens, ends, weights, scales = expert_case()
    ops.expert_products(tokens, ends, weights, scales=scales)
    own = {"attention": "attend", "dense": "linear_fp8", "experts": "expert_products"}[what]
    assert ours.names == [own]
    assert f"{what}: triton (" in ops.implementation()


def test_without_a_library_the_ops_are_our_own() -> None:
    assert joined(reference, choice.choose(CPU)) is truth
