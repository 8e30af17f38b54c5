"""Which of the shapes that compile well is the fastest here, and whether it is in use.

Attention over 2,048 random rows of a slab, at the batches of the paper; index logits shared by the
queries of a request against each alone; top-k with a list shared among programs against one program
for it. A row whose verdict is MISSED names what should be used instead.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ess.bench.gpu.layer import captured_us
from ess.bench.gpu.rig import Row, row
from ess.kernels.backend import ops
from ess.kernels.cuda.triton.attend import attend_lists, close_up
from ess.kernels.cuda.triton.index import logits_into, top_k_into
from ess.kernels.cuda.triton.launch import place
from ess.kernels.cuda.triton.shapes import candidates
from ess.kernels.merge import Partial
from ess.layout import IndexCodec, RowCodec, RowForm
from ess.units import PAGE_ROWS, div_ceil

TOP_K: Final = 2048
WITHIN: Final = 0.97
SLAB_ROWS: Final = 1 << 18
SCALE: Final = 192**-0.5
KEYS: Final = IndexCodec()

Timed = Callable[[Callable[[], Any]], list[float]]


class Point(NamedTuple):
    batch: int
    mtp: int
    heads: int
    form: RowForm
    k: int = TOP_K
    slab_rows: int = SLAB_ROWS


POINTS: Final = (
    *(Point(batch, mtp, 128, "fp8") for batch in (160, 80, 16, 1) for mtp in (1, 2, 4)),
    *(Point(batch, 2, heads, "fp8") for batch in (160, 16) for heads in (64, 32, 16)),
    *(Point(batch, 2, heads, "bf16") for batch in (160, 16, 1) for heads in (128, 32, 16)),
)
TOP_K_POINTS: Final = tuple(
    (lists, width) for width in (32 << 10, 128 << 10) for lists in (1, 4, 16, 64, 132)
)
LOGITS_POINTS: Final = tuple((batch, mtp) for batch in (1, 8, 32) for mtp in (2, 4))


def on_device(work: Callable[[], Any]) -> list[float]:
    return captured_us(torch.cuda.Stream(), work)  # type: ignore[no-untyped-call]


def once(work: Callable[[], Any]) -> list[float]:
    """Stands in for a timing when work runs only to compile kernels."""
    work()
    return [1.0]


def shapes_kernels() -> None:
    for _ in shapes_benchmark(smoke=False, timed=once):
        pass


def shapes_benchmark(*, smoke: bool, timed: Timed = on_device) -> Iterator[Row]:
    for point in POINTS[-1:] if smoke else POINTS:
        yield from attention_rows(point, timed, device="cuda")
    for lists, width in TOP_K_POINTS[:1] if smoke else TOP_K_POINTS:
        yield from top_k_rows(lists, width, timed, device="cuda")
    for batch, mtp in LOGITS_POINTS[:1] if smoke else LOGITS_POINTS:
        yield from logits_rows(batch, mtp, 128 << 10, timed, device="cuda")


def attention_rows(point: Point, timed: Timed, *, device: str) -> Iterator[Row]:
    codec, count = RowCodec(form=point.form), point.batch * point.mtp
    dim = codec.latent_dim + codec.rope_dim
    queries = torch.randn(count, point.heads, dim, device=device, dtype=torch.bfloat16)
    slab = _rows(codec, point.slab_rows, device)
    named = torch.randint(point.slab_rows, (count, point.k), dtype=torch.int32, device=device)
    lists = close_up(named)
    shape = count, point.heads
    out = torch.empty(*shape, codec.latent_dim, device=device)
    into = Partial(out, torch.empty(shape, device=device))
    taken: dict[str, list[float]] = {}
    where = place(queries)
    at: dict[str, Any] = {"generation": where.generation, "has_little": where.has_little}
    for candidate in candidates(form=point.form, heads=point.heads, is_half=True, **at):
        for way, balanced in (("even shares", True), ("whole lists", False)):
            more: dict[str, Any] = {"shape": candidate, "balanced": balanced, "scale": SCALE}
            work = partial(attend_lists, queries, slab, lists, codec, into=into, **more)
            taken[f"{candidate.name}, {way}"] = timed(work)
    yield from verdict("attention", taken, point._asdict())


def verdict(of: str, taken: dict[str, list[float]], config: dict[str, Any]) -> Iterator[Row]:
    """A row for each shape, and whether the first, which is in use, keeps up with the fastest."""
    for name, samples in taken.items():
        yield row(f"{of}: {name}", "us", samples, **config)
    used = next(iter(taken))
    best, least = min(
        ((name, statistics.median(samples)) for name, samples in taken.items()),
        key=lambda way: way[1],
    )
    rival = f"best: {best}", least
    yield row(f"{of} in use: {used}", "us", taken[used], baseline=rival, target=WITHIN, **config)


def _rows(codec: RowCodec, count: int, device: str) -> Tensor:
    """One block of encoded rows, repeated."""
    block = min(count, 4096)
    values = torch.randn(block, codec.latent_dim + codec.rope_dim)
    rows = torch.empty(block, codec.row_bytes, dtype=torch.uint8)
    return (
        ops("reference")
        .encode_rows(values, codec, rows)
        .to(device)
        .repeat(div_ceil(count, block), 1)
    )


def top_k_rows(
    lists: int, width: int, timed: Timed, *, device: str, k: int = TOP_K
) -> Iterator[Row]:
    logits = torch.randn(lists, width, device=device)
    lengths = torch.full((lists,), width, dtype=torch.int32, device=device)
    out = torch.empty(lists, k, dtype=torch.int32, device=device)

    def work(spreads: bool | None) -> Tensor:
        return top_k_into(logits, lengths, out=out, spreads=spreads)

    ways = {"by itself": None, "spread": True, "apart": False}
    taken = {name: timed(partial(work, spreads)) for name, spreads in ways.items()}
    yield from verdict("top-k", taken, {"lists": lists, "width": width})


def logits_rows(batch: int, mtp: int, context: int, timed: Timed, *, device: str) -> Iterator[Row]:
    """Also whether both give the same bits; a row that says so has 1 as its value."""
    width, count = div_ceil(context, PAGE_ROWS), batch * mtp
    pages = torch.randint(
        0, 0x7E, (batch * width, KEYS.page_bytes), dtype=torch.uint8, device=device
    )
    pages[:, PAGE_ROWS * KEYS.key_dim :].view(torch.float32).fill_(2.0**-8)
    order = torch.randperm(batch * width, device=device).int()
    table = order.view(batch, width).repeat_interleave(mtp, 0)
    lengths = torch.full((count,), context, dtype=torch.int32, device=device)
    queries = torch.randn(count, KEYS.head_count, KEYS.key_dim, device=device).bfloat16()
    weights = torch.rand(count, KEYS.head_count, device=device)
    outs = [torch.empty(count, width * PAGE_ROWS, device=device) for _ in range(2)]

    def work(each: int, out: Tensor) -> Tensor:
        given = queries, weights, pages, table, lengths, KEYS
        return logits_into(*given, out=out, queries_per_request=each)

    taken = {
        "shared": timed(partial(work, mtp, outs[0])),
        "alone": timed(partial(work, 1, outs[1])),
    }
    config: dict[str, Any] = {"batch": batch, "mtp": mtp, "context": context}
    yield from verdict("logits", taken, config)
    same = float(torch.equal(*outs))
    yield row("logits: shared are those alone", "true", [same], **config)
