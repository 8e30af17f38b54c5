"""Attention and index logits in other ways: rows read from host memory, and other libraries.

Few misses may be cheaper to attend in place, through the link, than to fetch and then attend. Where
FlashMLA or DeepGEMM is installed and passes its probe, it is timed beside ours; else a line says
why it is not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from ess.bench.gpu.layer import SCALE, Layer, captured_us, layers
from ess.bench.gpu.layer_memory import KEYS, ROWS
from ess.bench.gpu.layer_points import Point
from ess.bench.gpu.rig import Row, row
from ess.kernels.cuda.adapters import choice
from ess.kernels.cuda.adapters.deep_gemm import DeepGemm
from ess.kernels.cuda.adapters.flash_mla import FlashMla
from ess.units import PAGE_ROWS

PLACED: Final = (1, 4, 8, 16, 32)
REPLAYS: Final = 30

Fetch = tuple[Tensor, Tensor, Tensor, Tensor, int]


def attend_benchmark(*, smoke: bool) -> Iterator[Row]:
    for bench in benches(smoke=smoke):
        yield from bench.in_place(PLACED[:1] if smoke else PLACED)


def others_benchmark(*, smoke: bool, replays: int = REPLAYS) -> Iterator[Row]:
    chosen = choice.choose(torch.device("cuda"))
    for said in chosen.lines:
        print(said, file=sys.stderr)
    if chosen.attention is None and chosen.indexer is None:
        return
    for bench in benches(smoke=smoke, replays=replays):
        if chosen.attention is not None:
            yield from bench.flash_mla(chosen.attention)
        if chosen.indexer is not None:
            yield from bench.deep_gemm(chosen.indexer)


def attend_kernels() -> None:
    for bench in benches(smoke=False, replays=1):
        for _ in bench.in_place(PLACED):
            pass
        del bench


def others_kernels() -> None:
    """DeepGEMM compiles its programs as they are first called, which takes longer than to time
    them."""
    for _ in others_benchmark(smoke=False, replays=1):
        pass


def benches(*, smoke: bool, replays: int = REPLAYS) -> Iterator[Bench]:
    context = (4 << 10) if smoke else (32 << 10)
    points = (
        Point(batch=batch, queries=n, context=context, slots=max(context // 5, 2048 * n + 64))
        for batch, n in (((1, 1),) if smoke else ((16, 1), (160, 1), (64, 2), (16, 4)))
    )
    for layer in layers(points):
        yield Bench(layer, replays=2 if smoke else replays)
        del layer


class Bench:
    def __init__(self, layer: Layer, *, replays: int) -> None:
        self.layer, self.replays = layer, replays

    def us(self, work: Callable[[], Any]) -> list[float]:
        return captured_us(self.layer.compute, work, replays=self.replays)

    def row(
        self, name: str, us: list[float], baseline: tuple[str, list[float]], **more: Any
    ) -> Row:
        config = self.layer.point.config | more
        rival, samples = baseline
        return row(name, "us", us, baseline=(rival, sorted(samples)[len(samples) // 2]), **config)

    def in_place(self, counts: tuple[int, ...]) -> Iterator[Row]:
        """Missing rows of every query: read through the link, against fetched and then read."""
        query_count = len(self.layer.queries)
        for count in counts:
            rows = torch.randint(
                len(self.layer.rows.host), (query_count, count), dtype=torch.int32
            ).cuda()
            slots = torch.arange(rows.numel(), dtype=torch.int32, device="cuda")
            moved = torch.full((1,), rows.numel(), dtype=torch.int32, device="cuda")
            named = slots.view_as(rows) % len(self.layer.rows.slab)
            fetch = rows.flatten(), self.layer.rows.slab, named.flatten(), moved, 4
            there = self.us(functools.partial(self.attend, -2 - rows))
            rival = "fetched, then attended", self.us(functools.partial(self.both, fetch, named))
            yield self.row("attend in place", there, rival, placed=count)

    def both(self, fetch: Fetch, named: Tensor) -> None:
        self.layer.gather(self.layer.rows.host, *fetch)
        self.attend(named)

    def attend(self, named: Tensor) -> None:
        from ess.kernels.cuda.triton.attend import Lists, attend_lists

        layer = self.layer
        counts = torch.full((len(named),), named.shape[1], dtype=torch.int32, device="cuda")
        given = layer.queries, layer.rows.slab, Lists(named, counts), ROWS
        into = layer.partials[0]
        attend_lists(*given, scale=SCALE, placed=layer.rows.host, into=into, balanced=True)

    def flash_mla(self, theirs: FlashMla) -> Iterator[Row]:
        """A whole selection, and parts of it down to the shortest list that FlashMLA takes."""
        layer = self.layer
        slots, dense = torch.from_numpy(layer.batch.whole).cuda(), layer.rows.slab
        dense = dense[: len(dense) // PAGE_ROWS * PAGE_ROWS]
        ours = self.us(lambda: self.attend(slots))
        for width in (2048, 512, 256, 128, 64):
            part = slots[:, :width].contiguous()

            def attend(part: Tensor = part) -> None:
                theirs.attend(layer.queries, dense, part, scale=SCALE)

            rival = "ours, 2048 rows", ours
            yield self.row(f"FlashMLA, {width} rows", self.us(attend), rival)
        host = layer.rows.host[: len(layer.rows.host) // PAGE_ROWS * PAGE_ROWS]
        few = slots[:, :64].clamp(max=len(host) - 1)
        seen = view_of(host, layer.rows.slab.device)
        us = self.us(lambda: theirs.attend(layer.queries, seen, few, scale=SCALE))
        yield self.row("FlashMLA in place, 64 rows", us, ("ours, 2048 rows", ours))

    def deep_gemm(self, theirs: DeepGemm) -> Iterator[Row]:
        from ess.kernels.cuda.triton.index import logits_into

        layer = self.layer
        given = (
            layer.index.queries,
            layer.index.weights,
            layer.index.pages,
            layer.index.table,
            layer.index.lengths,
        )
        ours = self.us(lambda: logits_into(*given, KEYS, out=layer.index.logits))
        for each in {1, layer.point.queries}:
            work = functools.partial(theirs.index_logits, *given, queries_per_request=each)
            us = self.us(work)
            rival = "ours", ours
            yield self.row(f"DeepGEMM, {each} queries of a request together", us, rival)


def view_of(host: Tensor, device: torch.device) -> Tensor:
    """Pinned memory as a tensor of the device, which shares the host's addresses."""

    class HostBytes:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": tuple(host.shape),
            "typestr": "|u1",
            "data": (host.data_ptr(), False),
            "version": 3,
            "strides": None,
            "stream": None,
        }

    return torch.as_tensor(HostBytes(), device=device)
