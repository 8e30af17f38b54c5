"""Adapters of other libraries' kernels, against stand-ins that behave as the real ones do."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ess.errors import BadInput, Unavailable
from ess.kernels.calls import IndexQueries
from ess.kernels.cuda.adapters import choice, deep_gemm, flash_mla
from ess.layout import IndexCodec, RowCodec
from tests.kernels import test_attend
from tests.kernels.sets import reference

CPU = torch.device("cpu")
Install = Callable[..., types.ModuleType]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def put(name: str, **members: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return put


class FlashMlaStandIn:
    """FlashMLA's limits and its answers, computed by the reference; `wrong` breaks one of them."""

    def __init__(self, *, base: float = math.e, empty: float = math.inf, wrong: str = "") -> None:
        self.base, self.empty, self.wrong, self.schedules = base, empty, wrong, 0

    def get_mla_metadata(self, *arguments: Any, **options: Any) -> tuple[object, None]:
        self.schedules += 1
        return (options["num_heads_q"], options["topk"]), None

    def flash_mla_with_kvcache(
        self, q: Any, k: Any, table: Any, lengths: Any, width: int, plan: Any, splits: Any, *,
        softmax_scale: float, is_fp8_kvcache: bool, **named: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        names = named.pop("indices")
        assert is_fp8_kvcache
        assert not named
        assert q.dtype == torch.bfloat16
        assert q.is_contiguous()
        assert q.shape[1:3] in ((1, 64), (1, 128))
        assert k.shape[1:] == (64, 1, 656)
        assert k.dtype == torch.float8_e4m3fn
        assert names.dtype == torch.int32
        assert names.shape[2] % 64 == 0
        assert plan == (q.shape[2], names.shape[2])
        rows = k.reshape(-1, 656).view(torch.uint8)
        if self.wrong == "scale":
            rows = rows.clone()
            scales = rows[:, 512:528].view(torch.float32)
            scales.copy_(scales.log2().floor().exp2())
        ours = reference.attend(q[:, 0], rows, names[:, 0], RowCodec(), scale=softmax_scale)
        lse = ours.lse / math.log(self.base)
        lse[ours.lse == -math.inf] = self.empty
        if self.wrong == "lse":
            lse *= 3
        out = ours.out * (2 if self.wrong == "out" else 1)
        return out.bfloat16()[:, None], lse[..., None]


def flash(stand_in: FlashMlaStandIn, install: Install, name: str = "flash_mla") -> None:
    install(
        name,
        __version__="9.9",
        get_mla_metadata=stand_in.get_mla_metadata,
        flash_mla_with_kvcache=stand_in.flash_mla_with_kvcache,
    )


def whole_case(heads: int) -> test_attend.Case:
    case = test_attend.make(RowCodec(), heads=heads, dtype=torch.bfloat16)
    case.rows = torch.cat([case.rows, case.placed])[:576].contiguous()
    case.slots = torch.where(case.slots < -1, case.slots % 300, case.slots)
    case.rows[(case.rows == 0xFF).all(dim=1)] = 0
    case.slots[1] = -1
    return case


@pytest.mark.parametrize("base", [math.e, 2.0])
@pytest.mark.parametrize("empty", [math.inf, -math.inf])
@pytest.mark.parametrize("heads", [5, 64, 100])
def test_flash_mla_is_the_reference_whatever_its_build_means(
    install: Install, base: float, empty: float, heads: int
) -> None:
    stand_in = FlashMlaStandIn(base=base, empty=empty)
    flash(stand_in, install)
    adapter = flash_mla.load(CPU)
    assert adapter.base == ("e" if base == math.e else "2")
    said = f"flash_mla 9.9, lse of base {adapter.base}, {empty:+} where empty, for whole lists"
    assert adapter.line.startswith(said)
    case = whole_case(heads)
    for _ in range(2):
        ours = adapter.attend(case.queries, case.rows, case.slots, scale=case.scale)
    want = reference.attend(case.queries, case.rows, case.slots, RowCodec(), scale=case.scale)
    torch.testing.assert_close(ours.out, want.out, atol=8e-3, rtol=8e-3)
    torch.testing.assert_close(ours.lse, want.lse, atol=1e-5, rtol=1e-5)
    assert (ours.lse[1] == -math.inf).all()
    assert stand_in.schedules == 2  # the probe's and ours, not one for each call


def test_flash_mla_bad_input(install: Install) -> None:
    flash(FlashMlaStandIn(), install)
    adapter, case = flash_mla.load(CPU), whole_case(3)
    queries, rows, slots = case.queries, case.rows, case.slots
    for bad, says in (
        ((queries.float(), rows, slots), "queries has type torch.float32"),
        ((queries, rows[:100], slots), r"rows of shape \(100, 656\) must be dense pages of 64"),
        ((queries, rows, slots[:2]), r"slots has shape \(2, 94\), must be \(3, any\)"),
        ((queries.repeat(1, 50, 1), rows, slots), "150 heads, FlashMLA takes up to 128"),
    ):
        with pytest.raises(BadInput, match=says):
            adapter.attend(*bad, scale=1.0)


@pytest.mark.parametrize("wrong", ["lse", "out", "scale"])
def test_a_build_that_fails_the_probe_gives_way_to_the_next(install: Install, wrong: str) -> None:
    flash(FlashMlaStandIn(wrong=wrong), install)
    install("sgl_kernel.flash_mla")
    with pytest.raises(Unavailable) as refusal:
        flash_mla.load(CPU)
    assert "flash_mla: the probe got value" in str(refusal.value)
    assert "sgl_kernel.flash_mla: it has no flash_mla_with_kvcache" in str(refusal.value)
    flash(FlashMlaStandIn(), install, "sgl_kernel.flash_mla")
    assert flash_mla.load(CPU).line.startswith("sgl_kernel.flash_mla 9.9")


class DeepGemmStandIn:
    """DeepGEMM's limits; behind a length it leaves garbage."""

    def __init__(self, *, together: tuple[int, ...] = (1, 2), flat: bool = False) -> None:
        self.together, self.flat, self.calls = together, flat, []

    def get_num_sms(self) -> int:
        return 132

    def get_paged_mqa_logits_metadata(self, lengths: Any, block: int, sm_count: int) -> Any:
        assert (block, sm_count) == (64, 132)
        assert lengths.dim() == (1 if self.flat else 2), "lengths have the wrong form"
        assert lengths.is_cuda or lengths.max() > 0, "an illegal memory access was encountered"
        behind = lengths.untyped_storage().nbytes() - lengths.nbytes
        assert lengths.is_contiguous()
        assert behind >= lengths[0].nbytes, "a length behind the last is read"
        return "schedule"

    def fp8_paged_mqa_logits(
        self, q: Any, pages: Any, weights: Any, lengths: Any, table: Any, schedule: Any,
        width: int, *, clean_logits: bool,
    ) -> torch.Tensor:  # fmt: skip
        assert not clean_logits
        assert schedule == "schedule"
        count, together, heads, dim = q.shape
        assert together in self.together, f"next_n {together}"
        assert len(table) == len(lengths) == count
        assert pages.shape[1:] == (64, 1, 132)
        self.calls.append(together)
        counts = lengths
        if self.flat:
            counts = (lengths[:, None] + torch.arange(1 - together, 1)).clamp(min=0)
        codec = IndexCodec(head_count=heads)
        ours = reference.index_logits(
            q.reshape(-1, heads, dim), weights, pages.reshape(len(pages), -1),
            table.repeat_interleave(together, 0), counts.flatten(), codec,
        )  # fmt: skip
        return torch.nn.functional.pad(ours.nan_to_num(neginf=123.0), (0, 192), value=math.nan)


def gemm(stand_in: DeepGemmStandIn, install: Install) -> types.ModuleType:
    named = ("fp8_paged_mqa_logits", *deep_gemm.FUNCTIONS)
    members = {name: getattr(stand_in, name) for name in named}
    return install("deep_gemm", __version__="2.6", **members)


def index_case(requests: int, each: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(each)
    codec, count = IndexCodec(), requests * each
    pages = torch.zeros(9, codec.page_bytes, dtype=torch.uint8)
    keys = reference.encode_keys(torch.randn(9 * 64, 128, generator=generator), codec)
    reference.write_keys(pages, torch.arange(9 * 64), keys, codec)
    table = torch.stack([torch.randperm(9, generator=generator)[:4] for _ in range(requests)])
    last = torch.randint(each, 257, (requests,), generator=generator)
    lengths = (last[:, None] + torch.arange(1 - each, 1)).flatten()
    return {
        "queries": torch.randn(count, 64, 128, generator=generator).to(torch.float8_e4m3fn),
        "weights": torch.randn(count, 64, generator=generator),
        "pages": pages,
        "page_table": table.repeat_interleave(each, 0).int(),
        "lengths": lengths.int(),
    }


@pytest.mark.parametrize("each", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(("together", "flat"), [((1, 2), False), ((1, 2, 4), False), ((1,), True)])
def test_deep_gemm_is_the_reference_however_queries_are_joined(
    install: Install, together: tuple[int, ...], flat: bool, each: int
) -> None:
    stand_in = DeepGemmStandIn(together=together, flat=flat)
    gemm(stand_in, install)
    adapter = deep_gemm.load(CPU)
    assert sorted(adapter.together) == sorted(together)
    case = index_case(3, each)
    ours = adapter.index_logits(**case, queries_per_request=each)
    assert stand_in.calls[-1] == max(n for n in together if each % n == 0)
    want = reference.index_logits(**case, codec=IndexCodec())
    seen = want > -math.inf
    torch.testing.assert_close(ours[seen], want[seen], atol=1e-4, rtol=1e-5)
    chosen = reference.top_k(ours, case["lengths"], k=9)
    assert torch.equal(chosen, reference.top_k(want, case["lengths"], k=9))


def test_deep_gemm_that_cannot_or_errs_is_refused(install: Install) -> None:
    gemm(DeepGemmStandIn(together=(2,)), install)
    with pytest.raises(Unavailable, match="for one query: next_n 1; else lengths have the wrong"):
        deep_gemm.load(CPU, names=["deep_gemm"])
    stand_in = DeepGemmStandIn()
    gemm(stand_in, install).fp8_paged_mqa_logits = lambda *given, **options: (
        stand_in.fp8_paged_mqa_logits(*given, **options) * 1.01
    )
    with pytest.raises(Unavailable, match="probe failed"):
        deep_gemm.load(CPU, names=["deep_gemm"])


def other_requests(table: torch.Tensor, lengths: torch.Tensor) -> Any:
    """All have the pages of the first one."""
    return table[:1].expand_as(table), lengths


def beyond_a_split(table: torch.Tensor, lengths: torch.Tensor) -> Any:
    """Keys from the 257th on come from the first page."""
    return torch.cat((table[:, :4], table[:, :1].expand(-1, table.shape[1] - 4)), 1), lengths


@pytest.mark.parametrize("wrong", [other_requests, beyond_a_split])
def test_deep_gemm_is_probed_with_what_a_step_asks(install: Install, wrong: Any) -> None:
    stand_in = DeepGemmStandIn()

    def called(
        q: Any, pages: Any, weights: Any, lengths: Any, table: Any, *more: Any, **options: Any
    ) -> torch.Tensor:
        table, lengths = wrong(table, lengths)
        return stand_in.fp8_paged_mqa_logits(q, pages, weights, lengths, table, *more, **options)

    gemm(stand_in, install).fp8_paged_mqa_logits = called
    with pytest.raises(Unavailable, match="1 queries at once are wrong by"):
        deep_gemm.load(CPU, names=["deep_gemm"])


@pytest.mark.parametrize(("requests", "each", "taken"), [(256, 2, True), (257, 2, False)])
def test_deep_gemm_takes_batches_and_no_prompts(
    install: Install, requests: int, each: int, taken: bool
) -> None:
    """It compiles anew for each 32 requests."""
    gemm(DeepGemmStandIn(), install)
    adapter, codec = deep_gemm.load(CPU), IndexCodec()
    call = IndexQueries(
        queries=torch.empty(requests * each, 64, 128, dtype=torch.bfloat16),
        weights=torch.empty(requests * each, 64),
        pages=torch.empty(3, codec.page_bytes, dtype=torch.uint8),
        page_table=torch.zeros(1, 2, dtype=torch.int32).expand(requests * each, -1),
        lengths=torch.ones(requests * each, dtype=torch.int32),
        codec=codec,
        threads=1,
        queries_per_request=each,
    )
    assert adapter.takes(call) is taken
    assert not adapter.takes(call._replace(queries_per_request=1))


OLD = lambda lengths, heads, groups: ((), None)  # noqa: E731  no options
ANSWERS = {
    "other arguments": (
        {"get_mla_metadata": OLD, "flash_mla_with_kvcache": lambda q: q},
        "unexpected keyword argument 'num_heads_q'",
    ),
    "one result": (
        {
            "get_mla_metadata": lambda *_, **__: ((), None),
            "flash_mla_with_kvcache": lambda *_, **__: 7,
        },
        "cannot unpack non-iterable int",
    ),
    "refuses without a word": (
        {"get_mla_metadata": lambda *_, **__: [][0], "flash_mla_with_kvcache": None},
        "list index out of range",
    ),
    "a placeholder": ({}, "it has no flash_mla_with_kvcache, get_mla_metadata"),
}


@pytest.mark.parametrize(("members", "says"), ANSWERS.values(), ids=ANSWERS)
def test_a_module_of_another_make_is_refused_by_its_words(
    install: Install, members: dict[str, Any], says: str
) -> None:
    install("flash_mla", **members)
    chosen = choice.choose(CPU)
    assert chosen.attention is None
    assert chosen.lines[0].startswith("attention: triton (flash_mla: ")
    assert says in chosen.lines[0]


FALLS = {
    "ImportError('libcudart.so.12: cannot open\\nmore')": "libcudart.so.12: cannot open)",
    "OSError('undefined symbol: _ZN3c10')": "undefined symbol: _ZN3c10",
    "AssertionError()": "AssertionError",
    "SystemExit(1)": "SystemExit",
}


@pytest.mark.parametrize(("fault", "says"), FALLS.items(), ids=FALLS)
def test_a_module_that_cannot_be_imported_is_refused_by_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, says: str
) -> None:
    (tmp_path / "deep_gemm.py").write_text(f"raise {fault}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    chosen = choice.choose(CPU)
    assert chosen.indexer is None
    assert f"deep_gemm: {says}" in chosen.lines[1]


def test_deep_gemm_bad_input(install: Install) -> None:
    gemm(DeepGemmStandIn(), install)
    adapter, case = deep_gemm.load(CPU), index_case(3, 1)
    with pytest.raises(BadInput, match="3 queries are not 2 of each request"):
        adapter.index_logits(**case, queries_per_request=2)
    with pytest.raises(BadInput, match=r"weights has shape \(2, 64\), must be \(3, 64\)"):
        adapter.index_logits(**case | {"weights": case["weights"][:2]})


def test_the_choice_says_why() -> None:
    chosen = choice.choose(CPU)
    assert chosen.attention is None
    assert chosen.indexer is None
    assert chosen.lines[0].startswith("attention: triton (flash_mla: ")
    assert "deep_gemm: " in chosen.lines[1]


def test_the_choice_names_what_is_there(install: Install) -> None:
    flash(FlashMlaStandIn(), install)
    gemm(DeepGemmStandIn(), install)
    lines = choice.choose(CPU).lines
    assert lines[0] == (
        "attention: flash_mla 9.9, lse of base e, +inf where empty, for whole lists of up to 128 "
        "heads in bfloat16 over rows of 656 bytes; else triton"
    )
    assert lines[1] == (
        "indexer: deep_gemm 2.6, 2, 1 queries of a request at once, queries rounded to e4m3, for "
        "64, 32 heads over keys of 132 bytes, of up to 256 requests; else triton"
    )
