"""Attention, index logits, top-k and merge against torch's ops, on one thread.

Time is the thread's own run time, not the wall clock's, so that a busy machine disturbs less. Every
repetition draws a new selection over a matrix that the caches cannot hold. `roof_us` in the config
is the longer of two times that no kernel can beat here: the products at the rate of torch's best
matmul, and the selected bytes at the rate of a plain copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ess.bench.harness.measure.timing import Arm, Samples, measure
from ess.bench.harness.report import Row, compare
from ess.kernels.backend import ops
from ess.kernels.cpu import native
from ess.kernels.memory import host_memory
from ess.layout import IndexCodec, IndexForm, RowCodec, RowForm
from ess.units import PAGE_ROWS

CPU: Final = ops("cpu")
REPEATS: Final = 9
SCALE: Final = 0.1
TOP_K: Final = 2048
E4M3_TO_BF16: Final = 2.0**120


@dataclass(frozen=True, kw_only=True)
class Roof:
    """What torch reaches on this machine now: GFLOP/s of matmul and GB/s of a copy's two sides."""

    bf16_gflops: float
    f32_gflops: float
    copy_gbytes: float

    def time_us(self, flops: float, byte_count: float, *, form: str) -> float:
        rate = self.f32_gflops if form == "f32" else self.bf16_gflops
        return max(flops / rate, byte_count / self.copy_gbytes) / 1e3


def attend_benchmark(*, smoke: bool) -> list[Row]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            roof, rows = _roof(smoke=smoke)
            rows += _attention_rows(roof, smoke=smoke) + _index_rows(roof, smoke=smoke)
            rows += _together_rows(roof, smoke=smoke)
            counts = (4096,) if smoke else (4096, 32_768, 131_072)
            rows += [_top_k_row(count, smoke=smoke) for count in counts]
            return [*rows, _merge_row(smoke=smoke)]
    finally:
        torch.set_num_threads(before)


def _measure(arms: dict[str, Arm], *, smoke: bool) -> list[Samples]:
    return measure([*arms.values()], repeats=3 if smoke else REPEATS, clock=time.thread_time)


def _roof(*, smoke: bool) -> tuple[Roof, list[Row]]:
    size, byte_count = (256, 1 << 20) if smoke else (1024, 256 << 20)
    square, source = torch.ones(size, size), torch.ones(byte_count, dtype=torch.uint8)
    half, target = square.bfloat16(), torch.zeros_like(source)
    arms = {
        "bf16 matmul": Arm(name="bf16", run=lambda: torch.mm(half, half).view(torch.int16)),
        "f32 matmul": Arm(name="f32", run=lambda: torch.mm(square, square)),
        "copy": Arm(name="copy", run=lambda: target.copy_(source)[:64]),
    }
    rates = [2e-9 * size**3, 2e-9 * size**3, 2e-9 * byte_count]
    units = ["GFLOP/s", "GFLOP/s", "GB/s"]
    rows = [
        Row(name=f"roof: {name}", value=rate / samples.median_s, unit=unit)
        for name, rate, unit, samples in zip(
            arms, rates, units, _measure(arms, smoke=smoke), strict=True
        )
    ]
    bf16, f32, copy = (row.value for row in rows)
    return Roof(bf16_gflops=bf16, f32_gflops=f32, copy_gbytes=copy), rows


@dataclass(kw_only=True)
class Attention:
    """One layer's call, with new slots each time, which are the same for every arm."""

    codec: RowCodec
    rows: Tensor
    heads: int
    query_count: int
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __post_init__(self) -> None:
        dim = self.codec.latent_dim + self.codec.rope_dim
        plain = np.random.default_rng(1).standard_normal((self.query_count, self.heads, dim))
        kind = torch.float32 if self.codec.form == "f32" else torch.bfloat16
        self.queries = torch.from_numpy(plain).to(kind)
        self.prepare()
        self.into = CPU.attend(self.queries, self.rows, self.slots, self.codec, scale=SCALE)

    def prepare(self) -> None:
        """Draws an ascending selection; a draw in strata needs no permutation of all rows."""
        step = len(self.rows) // TOP_K
        offset = self.random.integers(0, step, (self.query_count, TOP_K), dtype=np.int32)
        self.slots = torch.from_numpy(offset + np.arange(TOP_K, dtype=np.int32) * step)

    def native(self) -> Tensor:
        CPU.attend(
            self.queries, self.rows, self.slots, self.codec, scale=SCALE, into=self.into, threads=1
        )
        return self.into.lse

    def torch(self) -> Tensor:
        """Gather, decode, two products: query by query, which is faster here than in a batch."""
        for query, slots, out, lse in zip(self.queries, self.slots, *self.into, strict=True):
            keys = _decode(self.rows.index_select(0, slots), self.codec)
            logits = torch.mm(query, keys.T).float() * SCALE
            lse.copy_(logits.logsumexp(dim=-1))
            weights = (logits - lse[:, None]).exp_().to(keys.dtype)
            out.copy_(torch.mm(weights, keys[:, : self.codec.latent_dim]))
        return self.into.lse


def _decode(named: Tensor, codec: RowCodec) -> Tensor:
    if codec.form != "fp8":
        return named.view(torch.float32 if codec.form == "f32" else torch.bfloat16)
    ends = [codec.latent_dim, codec.latent_dim + 4 * codec.scale_count]
    codes, scales, rope = (part.contiguous() for part in named.tensor_split(ends, dim=1))
    scales = (scales.view(torch.float32) * E4M3_TO_BF16).bfloat16()
    latent = _widen(codes).view(len(named), codec.scale_count, -1) * scales[..., None]
    return torch.cat([latent.flatten(1), rope.view(torch.bfloat16)], dim=1)


def _widen(codes: Tensor) -> Tensor:
    """e4m3 as bf16, 2^120 too small: the bits in their new places. Torch's own cast is slower."""
    bits = codes.to(torch.int16)
    return ((bits & 0x80) << 8 | (bits & 0x7F) << 4).view(torch.bfloat16)


def _attention_rows(roof: Roof, *, smoke: bool) -> list[Row]:
    cases: list[tuple[RowForm, int, int]]
    cases = [("fp8", heads, count) for heads in (4, 16, 128) for count in (1, 16)]
    cases += [("bf16", 16, 1), ("f32", 16, 1)]
    return [
        _attention_row(roof, RowCodec(form=form), heads, count, smoke=smoke)
        for form, heads, count in cases
        if not smoke or heads == 4
    ]


def _attention_row(roof: Roof, codec: RowCodec, heads: int, queries: int, *, smoke: bool) -> Row:
    sides = [
        Attention(codec=codec, rows=rows, heads=heads, query_count=queries)
        for rows in [_rows(codec, 4096 if smoke else 131_072)] * 2
    ]
    samples = _measure(
        {
            "native": Arm(name="native", run=sides[0].native, prepare=sides[0].prepare),
            "torch": Arm(name="torch", run=sides[1].torch, prepare=sides[1].prepare),
        },
        smoke=smoke,
    )
    sides[1].slots = sides[0].slots
    # torch rounds its logits to bf16
    torch.testing.assert_close(sides[0].native(), sides[1].torch(), atol=0.1, rtol=0)
    flops = 2.0 * queries * heads * TOP_K * (2 * codec.latent_dim + codec.rope_dim)
    roof_us = roof.time_us(flops, queries * TOP_K * codec.row_bytes, form=codec.form)
    config = {"form": codec.form, "heads": heads, "queries": queries, "top_k": TOP_K}
    return _row("sparse attention", "torch ops", samples, config, roof_us=roof_us)


def _rows(codec: RowCodec, count: int) -> Tensor:
    rows = torch.from_numpy(host_memory(count * codec.row_bytes)).view(count, codec.row_bytes)
    sample = torch.randn(4096, codec.latent_dim + codec.rope_dim)
    encoded = CPU.encode_rows(sample, codec, torch.empty(4096, codec.row_bytes, dtype=torch.uint8))
    rows.view(-1, 4096, codec.row_bytes).copy_(encoded)
    return rows


def _row(
    name: str,
    rival_name: str,
    samples: list[Samples],
    config: dict[str, Any],
    *,
    roof_us: float | None = None,
) -> Row:
    ours, rival = samples
    if roof_us is not None:
        config |= {"roof_us": round(roof_us, 1), "of_roof": round(roof_us / ours.median_s / 1e6, 2)}
    return compare(
        name=name,
        unit="us",
        ours=ours.each(scale=1e6),
        baseline=(rival_name, rival.each(scale=1e6)),
        config=config | {"kernels": native.kernels() if native.available() else "torch"},
    )


def _index_rows(roof: Roof, *, smoke: bool) -> list[Row]:
    cases: list[tuple[IndexForm, int, int]]
    cases = [("fp8", 64, 32_768), ("fp8", 8, 4096), ("fp8", 8, 32_768), ("f32", 8, 4096)]
    return [
        _index_row(roof, IndexCodec(form=form, head_count=heads), 4096 if smoke else context)
        for form, heads, context in cases[2 if smoke else 0 :]
    ]


def _pages(codec: IndexCodec, context: int) -> Tensor:
    pages = torch.zeros(context // PAGE_ROWS, codec.page_bytes, dtype=torch.uint8)
    keys = CPU.encode_keys(torch.randn(context, codec.key_dim), codec)
    CPU.write_keys(pages, torch.arange(context), keys, codec)
    return pages


def _asked(codec: IndexCodec, count: int) -> tuple[Tensor, Tensor]:
    """Queries within the range of fp8, and the weights of their heads."""
    kind = torch.float32 if codec.form == "f32" else torch.bfloat16
    queries = torch.randn(count, codec.head_count, codec.key_dim).to(torch.float8_e4m3fn)
    return queries.to(kind), torch.randn(count, codec.head_count)


def _index_row(roof: Roof, codec: IndexCodec, context: int) -> Row:
    page_count = context // PAGE_ROWS
    pages, (queries, weights) = _pages(codec, context), _asked(codec, 1)
    out, table = torch.empty(1, context), torch.randperm(page_count, dtype=torch.int32)[None]
    lengths = torch.tensor([context], dtype=torch.int32)

    def ours() -> Tensor:
        return CPU.index_logits(queries, weights, pages, table, lengths, codec, out=out)

    def rival() -> Tensor:
        return _torch_logits(queries, weights, pages.index_select(0, table[0]), codec)

    great = float(ours().abs().max())  # torch rounds its dots to bf16
    torch.testing.assert_close(ours(), rival(), atol=0.02 * great, rtol=0)
    samples = _measure(
        {"native": Arm(name="native", run=ours), "torch": Arm(name="torch", run=rival)},
        smoke=context == 4096,
    )
    flops = 2.0 * context * codec.head_count * codec.key_dim
    roof_us = roof.time_us(flops, page_count * codec.page_bytes, form=codec.form)
    config = {"form": codec.form, "heads": codec.head_count, "context": context}
    return _row("index logits", "torch ops", samples, config, roof_us=roof_us)


def _together_rows(roof: Roof, *, smoke: bool) -> list[Row]:
    contexts = [4096] if smoke else [4096, 16_384, 131_072]
    cases = [(8, count, context) for count in (2, 4, 64) for context in contexts]
    return [
        _together_row(roof, IndexCodec(form="fp8", head_count=heads), count, context, smoke=smoke)
        for heads, count, context in (cases[:2] if smoke else [*cases, (64, 2, 16_384)])
    ]


def _together_row(roof: Roof, codec: IndexCodec, count: int, context: int, *, smoke: bool) -> Row:
    """Queries of one request, against as many queries whose neighbours share no pages."""
    pages, (queries, weights) = _pages(codec, context), _asked(codec, count)
    order = torch.randperm(len(pages), dtype=torch.int32)
    same, parted = order.repeat(count, 1), order.repeat(count, 1)
    parted[1::2] = order.flip(0)
    lengths = torch.full((count,), context, dtype=torch.int32)
    out = torch.empty(count, context)

    def arm(name: str, table: Tensor) -> Arm:
        def run() -> Tensor:
            CPU.index_logits(queries, weights, pages, table, lengths, codec, out=out)
            return out[0]

        return Arm(name=name, run=run)

    samples = _measure({"one": arm("one", same), "each": arm("each", parted)}, smoke=smoke)
    flops = 2.0 * count * context * codec.head_count * codec.key_dim
    roof_us = roof.time_us(flops, len(pages) * codec.page_bytes, form=codec.form)
    config: dict[str, Any] = {"heads": codec.head_count, "queries": count, "context": context}
    config |= {"gflops": [round(flops / side.median_s / 1e9) for side in samples]}
    return _row("index logits of one request", "a page per query", samples, config, roof_us=roof_us)


def _torch_logits(queries: Tensor, weights: Tensor, pages: Tensor, codec: IndexCodec) -> Tensor:
    split = PAGE_ROWS * codec.value_bytes
    values, scales = pages[:, :split].reshape(-1, codec.value_bytes), pages[:, split:]
    keys = values.view(torch.float32) if codec.form == "f32" else _widen(values)
    dots = torch.mm(queries[0], keys.T).relu_().float()
    logits = torch.mm(weights, dots)
    if codec.form == "f32":
        return logits
    return logits * (scales.contiguous().view(torch.float32).view(1, -1) * E4M3_TO_BF16)


def _top_k_row(count: int, *, smoke: bool) -> Row:
    """New logits every time: branch prediction learns a list that is sorted twice."""
    logits, lengths = torch.empty(1, count), torch.tensor([count], dtype=torch.int32)
    out = torch.empty(1, TOP_K, dtype=torch.int32)
    arms: dict[str, Callable[[], Tensor]] = {
        "native": lambda: CPU.top_k(logits, lengths, k=TOP_K, out=out),
        "torch": lambda: torch.topk(logits, TOP_K, sorted=False).indices,
    }
    samples = _measure(
        {name: Arm(name=name, run=run, prepare=logits.normal_) for name, run in arms.items()},
        smoke=smoke,
    )
    config = {"count": count, "top_k": TOP_K}
    return _row("top-k", "torch.topk, any order", samples, config)


def _merge_row(*, smoke: bool) -> Row:
    shape = (2, 16) if smoke else (16, 128)
    sides = [(torch.randn(*shape, 512), torch.randn(shape)) for _ in range(2)]
    into = CPU.merge(*sides)
    arms: dict[str, Callable[[], Any]] = {
        "native": lambda: CPU.merge(*sides, into=into),
        "torch": lambda: ops("reference").merge(*sides, into=into),
    }
    samples = _measure({name: Arm(name=name, run=run) for name, run in arms.items()}, smoke=smoke)
    return _row("merge", "torch ops", samples, {"queries": shape[0], "heads": shape[1]})
