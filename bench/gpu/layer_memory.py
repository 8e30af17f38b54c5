"""What one layer of a decode step has on a GPU, by its reader: rows and their host, lists of
slots, the index, weights. All of it is random and finite, of DeepSeek-V3.2's dimensions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ess.bench.gpu.layer_points import HOST_ROWS_MAX, TOP_K, Batch, Point
from ess.kernels.cuda.driver import shared_device
from ess.kernels.cuda.pinned import pinned_memory
from ess.layout import IndexCodec, RowCodec
from ess.units import PAGE_ROWS, align_up, div_ceil

HEADS: Final = 128
HIDDEN: Final = 7168
QUERY_RANK: Final = 1536
QUERY_WIDTH: Final = HEADS * 192
ROWS: Final = RowCodec()
KEYS: Final = IndexCodec()
DIM: Final = ROWS.latent_dim + ROWS.rope_dim
BLOCK_ROWS: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """`host_rows` of the host are copied to `target_slots` of the slab."""

    slab: Tensor
    host: Tensor
    host_rows: Tensor
    target_slots: Tensor

    @classmethod
    def drawn(cls, point: Point, batch: Batch) -> Rows:
        return cls(
            slab=_random_rows(align_up(point.batch * point.slots, PAGE_ROWS), "cuda"),
            host=_random_rows(min(HOST_ROWS_MAX, point.batch * point.context), "cpu"),
            host_rows=torch.from_numpy(batch.host_rows).cuda(),
            target_slots=torch.from_numpy(batch.target_slots).cuda(),
        )


class ListedSlots(NamedTuple):
    """Of the whole selection, of the resident rows, and of those that are fetched."""

    whole: Any
    resident: Any
    fetched: Any

    @classmethod
    def of(cls, batch: Batch) -> ListedSlots:
        from ess.kernels.cuda.triton.attend import close_up

        named = batch.whole, batch.resident, batch.fetched
        return cls(*(close_up(torch.from_numpy(slots).cuda()) for slots in named))


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Pages of keys in no order, and what is asked of them and written."""

    pages: Tensor
    table: Tensor
    lengths: Tensor
    queries: Tensor
    weights: Tensor
    logits: Tensor
    selection: Tensor

    @classmethod
    def drawn(cls, point: Point) -> Index:
        count, width = point.query_count, div_ceil(point.context, PAGE_ROWS)
        pages = torch.randint(
            0, 0x7E, (point.batch * width, KEYS.page_bytes), dtype=torch.uint8, device="cuda"
        )
        pages[:, PAGE_ROWS * KEYS.key_dim :].view(torch.float32).fill_(2.0**-8)
        order = torch.randperm(point.batch * width, device="cuda", dtype=torch.int32)
        asked = torch.randn(count, KEYS.head_count, KEYS.key_dim, device="cuda")
        return cls(
            pages=pages,
            table=order.view(point.batch, width).repeat_interleave(point.queries, 0),
            lengths=torch.full((count,), point.context, dtype=torch.int32, device="cuda"),
            queries=asked.to(torch.float8_e4m3fn),
            weights=torch.rand(count, KEYS.head_count, device="cuda"),
            logits=torch.empty(count, width * PAGE_ROWS, device="cuda"),
            selection=torch.empty(count, TOP_K, dtype=torch.int32, device="cuda"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Of the projections, and the states that they multiply."""

    hidden: Tensor
    rank: Tensor
    key: Tensor
    index: Tensor
    query: Tensor
    absorb: Tensor

    @classmethod
    def drawn(cls, count: int) -> Weights:
        def half(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

        return cls(
            hidden=half(count, HIDDEN),
            rank=half(count, QUERY_RANK),
            key=half(HIDDEN, KEYS.key_dim + KEYS.head_count),
            index=half(QUERY_RANK, KEYS.head_count * KEYS.key_dim),
            query=half(QUERY_RANK, QUERY_WIDTH),
            absorb=half(HEADS, 128, 512),
        )


def _random_rows(count: int, where: str) -> Tensor:
    """One block of rows without NaN, repeated."""
    block = torch.randint(0, 0x7E, (BLOCK_ROWS, ROWS.row_bytes), dtype=torch.uint8, device=where)
    scales_to = ROWS.latent_dim + 4 * ROWS.scale_count
    block[:, ROWS.latent_dim : scales_to].view(torch.float32).fill_(2.0**-8)
    block[:, scales_to:].view(torch.bfloat16).fill_(0.125)
    rows = (
        _pinned(count)
        if where == "cpu"
        else torch.empty(count, ROWS.row_bytes, dtype=torch.uint8, device=where)
    )
    for start in range(0, count, BLOCK_ROWS):
        rows[start : start + BLOCK_ROWS] = block[: count - start]
    return rows


def _pinned(count: int) -> Tensor:
    """Registered as pools are: torch would take the next power of two, and keep it."""
    memory = pinned_memory(shared_device(0), count * ROWS.row_bytes, row_bytes=ROWS.row_bytes)
    return torch.from_numpy(memory).view(count, ROWS.row_bytes)
