"""Our calls of FlashMLA and DeepGEMM against their own signatures and what they refuse.

Written down after their sources: deepseek-ai/FlashMLA c28eca9 and 9241ae3, sgl-project/sglang
176ee5c (`sgl_kernel.flash_mla`), deepseek-ai/DeepGEMM 54e2261 (2.6.1) and 38f8ef7, and the
packages sgl-flash-mla 1.0.0, sgl-deep-gemm 0.1.5.post1, 0.1.7 and 0.2.5 and tokenspeed-deepgemm
2.8.2. A call
goes first to the signature, which binds it as Python or pybind would, then to what the sources ask
of shapes, types and strides, then to the stand-in that computes.
"""

from __future__ import annotations

import contextlib
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ess.door.device.memory.lane import DeviceLane
from ess.errors import Unavailable
from ess.kernels.cuda.adapters import deep_gemm, deep_gemm_experts, deep_gemm_linear, flash_mla
from tests.kernels import test_adapter_experts, test_adapter_linear
from tests.kernels.sets import reference
from tests.kernels.test_adapters import (
    CPU,
    DeepGemmStandIn,
    FlashMlaStandIn,
    Install,
    gemm,
    index_case,
    install,
    whole_case,
)
from tests.support.emulate import needs_compiler

__all__ = ["install"]

Call = Callable[..., Any]


def signature(needed: str, optional: str = "") -> inspect.Signature:
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, either) for name in needed.split()]
    parameters += [inspect.Parameter(name, either, default=None) for name in optional.split()]
    return inspect.Signature(parameters)


def signed(by: inspect.Signature, checked: Call, computed: Call) -> Call:
    """`computed`, for calls that the signature binds and that the check lets pass."""

    def call(*given: Any, **named: Any) -> Any:
        bound = by.bind(*given, **named)
        bound.apply_defaults()
        checked(**bound.arguments)
        return computed(*given, **named)

    return call


# ---- FlashMLA: schedules that are tensors, and since 082094b objects that the first call fills

KEPT = "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata"
SCHEDULED = signature(
    "cache_seqlens num_q_tokens_per_head_k num_heads_k", "num_heads_q is_fp8_kvcache topk"
)
ANYTHING = inspect.signature(lambda *args, **kwargs: None)
FLASH = {
    "c28eca9": (
        SCHEDULED,
        signature(f"{KEPT} num_splits", "softmax_scale causal is_fp8_kvcache indices"),
    ),
    "sglang": (
        SCHEDULED,
        signature(
            f"{KEPT} num_splits",
            "softmax_scale causal descale_q descale_k is_fp8_kvcache indices",
        ),
    ),
    "9241ae3": (
        ANYTHING,
        signature(
            KEPT,
            "num_splits softmax_scale causal is_fp8_kvcache indices attn_sink extra_k_cache"
            " extra_indices_in_kvcache topk_length extra_topk_length",
        ),
    ),
    "fork 1.0.0": (
        ANYTHING,
        signature(
            KEPT,
            "num_splits softmax_scale causal is_fp8_kvcache indices attn_sink extra_k_cache"
            " extra_indices_in_kvcache topk_length extra_topk_length enable_batch_invariant"
            " use_legacy kv_format descale_q descale_k",
        ),
    ),
}


def check_schedule(**given: Any) -> None:
    """`get_mla_decoding_metadata` of c28eca9; since 082094b nothing is asked."""
    if "cache_seqlens" not in given:
        return
    lengths, heads = given["cache_seqlens"], given["num_heads_q"]
    assert lengths.is_contiguous()
    assert lengths.dtype == torch.int32
    assert heads % given["num_heads_k"] == 0
    assert given["num_q_tokens_per_head_k"] == heads // given["num_heads_k"]
    assert given["is_fp8_kvcache"]
    assert given["topk"] % 64 == 0


def check_attention(**given: Any) -> None:
    q, k, table, lengths = (
        given[name] for name in ("q", "k_cache", "block_table", "cache_seqlens")
    )
    count, queries, heads, dim = q.shape
    assert count > 0
    assert queries == 1
    assert heads in (64, 128)
    assert (dim, given["head_dim_v"]) == (576, 512)
    assert q.dtype == torch.bfloat16
    assert k.dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8)
    assert k.shape[1:] == (64, 1, 656)
    assert (k.stride(1), k.stride(3)) == (656, 1)
    assert k.data_ptr() % 16 == 0
    names = given["indices"]
    assert names.shape == (count, 1, names.shape[2])
    assert names.dtype == table.dtype == lengths.dtype == torch.int32
    assert names.shape[2] > 0
    assert names.shape[2] % 64 == 0
    assert names.stride(2) == q.stride(3) == table.stride(1) == 1
    assert len(table) == len(lengths) == count
    assert not given["causal"]
    assert given["is_fp8_kvcache"]
    assert given.get("use_legacy", True), "these kernels take rows of 528 bytes, on sm_100"


class Schedule:
    """`FlashMLASchedMeta`: empty until the first call, then for calls of that form alone."""

    form: tuple[int, ...] | None = None


class FlashMla(FlashMlaStandIn):
    """One edition."""

    def __init__(self, edition: str) -> None:
        super().__init__()
        scheduled, attended = FLASH[edition]
        self.fills = scheduled is ANYTHING
        self.made = {
            "get_mla_metadata": signed(scheduled, check_schedule, self.schedule),
            "flash_mla_with_kvcache": signed(attended, check_attention, self.attend),
        }
        if "use_legacy" in attended.parameters:
            self.made["has_legacy"] = lambda: True

    def schedule(self, *given: Any, **named: Any) -> tuple[Any, Any]:
        self.schedules += 1
        return Schedule(), None if self.fills else torch.zeros(3, dtype=torch.int32)

    def attend(self, q: Any, k: Any, table: Any, lengths: Any, width: int, plan: Any, splits: Any,
               **named: Any) -> Any:  # fmt: skip
        named.pop("use_legacy", None)
        form = *q.shape[:3], k.shape[1], named["indices"].shape[2]
        assert isinstance(plan, Schedule)
        assert (splits is None) == self.fills
        assert plan.form in (None, form), "inputs are inconsistent with sched_meta"
        plan.form = form
        answered = FlashMlaStandIn.flash_mla_with_kvcache
        asked = q.shape[2], named["indices"].shape[2]
        return answered(self, q, k, table, lengths, width, asked, splits, **named)


def flash(edition: str, install: Install) -> FlashMla:
    stand_in = FlashMla(edition)
    install("flash_mla", **stand_in.made)
    return stand_in


@pytest.mark.parametrize("edition", FLASH)
@pytest.mark.parametrize("heads", [5, 64, 128])
def test_flash_mla_is_called_as_its_editions_ask(
    install: Install, edition: str, heads: int
) -> None:
    flash(edition, install)
    adapter, case = flash_mla.load(CPU), whole_case(heads)
    for slots in (case.slots, case.slots[:, :64].contiguous(), case.slots[:, :0]):
        ours = adapter.attend(case.queries, case.rows, slots, scale=case.scale)
        want = reference.attend(case.queries, case.rows, slots, case.codec, scale=case.scale)
        torch.testing.assert_close(ours.out, want.out, atol=8e-3, rtol=8e-3)


def test_a_capture_is_looked_for_on_the_device_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is not the current one where a library's user has pools on another."""
    current = [torch.device("cuda", 0)]

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[-1].index == 1)
    for ordinal in range(2):
        home = torch.device("cuda", ordinal)
        lane: Any = SimpleNamespace(home=home)
        assert DeviceLane.is_captured.__get__(lane) == bool(ordinal)
        rows: Any = SimpleNamespace(is_cuda=True, device=home)
        assert flash_mla.is_captured(rows) == bool(ordinal)


@pytest.mark.parametrize("edition", FLASH)
def test_a_schedule_of_a_capture_is_no_other_s(
    install: Install, edition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written when that graph is replayed. One that was made before is everybody's."""
    stand_in = flash(edition, install)
    adapter, case = flash_mla.load(CPU), whole_case(64)
    capturing = True
    monkeypatch.setattr(flash_mla, "is_captured", lambda _: capturing)

    def asked() -> int:
        before = stand_in.schedules
        for _ in range(2):
            adapter.attend(case.queries, case.rows, case.slots, scale=case.scale)
        return stand_in.schedules - before

    assert asked() == 2
    capturing = False
    assert asked() == 1
    capturing = True
    assert asked() == 0


# ---- DeepGEMM: csrc/apis/attention.hpp, gemm.hpp, layout.hpp


SCHEDULE = signature("context_lens block_kv num_sms", "indices")
LOGITS = signature(
    "q kv_cache weights context_lens block_table schedule_meta max_context_len",
    "clean_logits indices",
)
JOINT_LOGITS = signature(
    "q kv_cache weights context_lens block_table schedule_meta max_context_len", "indices"
)
MORE = "recipe recipe_a recipe_b compiled_dims disable_ue8m0_cast"
PRODUCT = signature("a b d", f"c {MORE}")
PRODUCTS = signature("a b d masked_m expected_m", MORE)


def check_lengths(**given: Any) -> None:
    lengths = given["context_lens"]
    assert lengths.dtype == torch.int32
    assert lengths.is_contiguous()
    assert given["block_kv"] == 64


def check_logits(**given: Any) -> None:
    q, pages, weights, lengths, table = (
        given[name] for name in ("q", "kv_cache", "weights", "context_lens", "block_table")
    )
    batch, together, heads, dim = q.shape
    assert heads in (32, 64)
    assert dim == 128
    assert q.dtype == torch.float8_e4m3fn
    assert q.is_contiguous()
    assert pages.shape[1:] == (64, 1, 132)
    assert (pages.stride(1), pages.stride(3)) == (132, 1)
    assert pages.stride(0) % 16 == 0
    assert pages.dtype == torch.uint8
    assert weights.shape == (batch * together, heads)
    assert weights.dtype == torch.float32
    assert weights.is_contiguous()
    assert table.stride(1) == 1
    assert table.dtype == lengths.dtype == torch.int32
    assert lengths.is_contiguous()
    assert 0 <= int(table.min()) <= int(table.max()) < len(pages)
    assert len(table) == batch
    assert given["max_context_len"] == table.shape[1] * 64


def check_joint_logits(**given: Any) -> None:
    assert type(given["q"]) is tuple, "pybind takes no list and no tensor for it"
    queries, scales = given["q"]
    assert scales is None, "they are for fp4"
    check_logits(**given | {"q": queries})


def is_major(tensor: torch.Tensor) -> bool:
    """`major_check`, and K-major, which Hopper asks of fp8."""
    dense = tensor.dim() == 2 or tensor.stride(0) == tensor.shape[-2] * tensor.shape[-1]
    return dense and tensor.stride(-1) == 1


def check_product(**given: Any) -> None:
    """TMA reads lines whose strides are multiples of 16 bytes, from places that are."""
    (values, value_scales), (weights, scales), d = given["a"], given["b"], given["d"]
    assert type(given["a"]) is type(given["b"]) is tuple
    assert given.get("c") is None
    assert values.dtype == weights.dtype == torch.float8_e4m3fn
    assert value_scales.dtype == scales.dtype == torch.float32
    (m, k), (n, _) = values.shape[-2:], weights.shape[-2:]
    assert m > 0
    assert weights.shape[-1] == k
    assert value_scales.shape == (*values.shape[:-2], m, -(-k // 128))
    assert scales.shape == (*weights.shape[:-2], -(-n // 128), -(-k // 128))
    assert d.shape == (*values.shape[:-1], n)
    assert d.dtype == torch.bfloat16
    assert all(map(is_major, (values, weights, d)))
    assert scales.is_contiguous()
    for each in (values, weights, d):
        assert each.stride(-2) * each.element_size() % 16 == 0
        assert each.data_ptr() % 16 == 0


def check_experts(**given: Any) -> None:
    """Blocks of up to 128 tokens are stored whole, into the room of one expert."""
    counts = given.pop("masked_m")
    check_product(**given)
    assert counts.is_contiguous()
    assert counts.dtype == torch.int32
    assert len(counts) == len(given["a"][0]) == len(given["b"][0])
    assert type(given["expected_m"]) is int
    assert given["expected_m"] > 0
    assert given["d"].shape[1] % 128 == 0


def logits_of(edition: str, stand_in: DeepGemmStandIn) -> dict[str, Call]:
    """The function by its name: 2.6.1 has two, of which we call the older one."""
    alone = stand_in.fp8_paged_mqa_logits

    def joint(q: Any, *others: Any) -> torch.Tensor:
        return alone(q[0], *others, clean_logits=False)

    if edition == "2.6.1":
        return {"fp8_paged_mqa_logits": signed(LOGITS, check_logits, alone)}
    return {"fp8_fp4_paged_mqa_logits": signed(JOINT_LOGITS, check_joint_logits, joint)}


@pytest.mark.parametrize(
    ("each", "edition"), [(1, "2.6.1"), (2, "2.6.1"), (3, "2.6.1"), (2, "2.8.2")]
)
def test_index_logits_are_asked_as_deep_gemm_takes_them(
    install: Install, each: int, edition: str
) -> None:
    stand_in = DeepGemmStandIn()
    install(
        "deep_gemm",
        get_num_sms=stand_in.get_num_sms,
        get_paged_mqa_logits_metadata=signed(
            SCHEDULE, check_lengths, stand_in.get_paged_mqa_logits_metadata
        ),
        **logits_of(edition, stand_in),
    )
    adapter, case = deep_gemm.load(CPU), index_case(32, each)
    case["page_table"][:, 3:] = -1
    case["lengths"].clamp_(max=192)
    ours = adapter.index_logits(**case, queries_per_request=each)
    want = reference.index_logits(**case, codec=deep_gemm.CODEC)
    seen = want > -torch.inf
    torch.testing.assert_close(ours[seen], want[seen], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("flat", [False, True])
def test_a_batch_of_pads_alone_has_a_key_each(install: Install, flat: bool) -> None:
    """Its kernel of schedules reads beyond its memory where no request has a key."""
    gemm(DeepGemmStandIn(flat=flat, together=(1,)), install)
    adapter, case = deep_gemm.load(CPU), index_case(32, 1)
    case |= {"lengths": torch.zeros_like(case["lengths"])}
    case |= {"page_table": torch.full_like(case["page_table"], -1)}
    logits = adapter.index_logits(**case)
    chosen = reference.top_k(logits, case["lengths"], k=9)
    assert (chosen == -1).all()


def test_products_are_asked_as_deep_gemm_takes_them(install: Install) -> None:
    dense = test_adapter_linear.StandIn().fp8_gemm_nt
    install("deep_gemm", fp8_gemm_nt=signed(PRODUCT, check_product, dense))
    linear = deep_gemm_linear.load(CPU)
    for count in (1, 5, 130):
        values, weights, scales = test_adapter_linear.given(count)
        linear.linear_fp8(values, weights, scales)


@pytest.mark.parametrize("name", deep_gemm_experts.MASKED)
def test_so_are_products_of_experts_by_either_name(install: Install, name: str) -> None:
    grouped = test_adapter_experts.StandIn().m_grouped_fp8_gemm_nt_masked
    install("deep_gemm", **{name: signed(PRODUCTS, check_experts, grouped)})
    experts = deep_gemm_experts.load(CPU)
    for counts in ([3, 0, 4], [0, 0, 1], [300, 1, 0]):
        case = test_adapter_experts.case_of(counts, torch.bfloat16)
        assert test_adapter_experts.run(experts, case).isfinite().all()


@needs_compiler
def test_a_library_that_asks_for_what_is_nowhere_is_refused_before_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sgl-deep-gemm 0.1.7 does beside torch 2.11: apache-tvm-ffi would load it all the same."""
    folder = tmp_path / "lazily_bound"
    folder.mkdir()
    (tmp_path / "tvm_ffi.py").touch()
    (folder / "__init__.py").write_text("get_num_sms = get_paged_mqa_logits_metadata = print\n")
    code = 'extern "C" void of_another_torch(); void call() { of_another_torch(); }'
    built = "g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", folder / "_C.so"
    subprocess.run(built, input=code.encode(), check=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)  # so that its end takes the stub out again
    del sys.modules["tvm_ffi"]
    with pytest.raises(Unavailable, match="undefined symbol: of_another_torch"):
        deep_gemm.load(CPU, names=("lazily_bound",))
