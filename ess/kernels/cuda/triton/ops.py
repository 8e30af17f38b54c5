"""The ops of a CUDA device: shapes, ids and devices are checked here, then kernels trust.

Ids lie on the device, so looking at them waits for it; while a graph is captured they are not
looked at. A caller that overlaps work, or that made the ids itself, uses the launches behind this
door: `attend_lists`, `logits_into`, `top_k_into`, `store_keys`, `merge_into`, `products_into`.

`threads` is for the CPU and means nothing here. What one query gets depends on its own list alone.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
from torch import Tensor

from ess.errors import BadInput
from ess.kernels.checks import (
    SINGLE,
    check_attend,
    check_attention,
    check_index,
    check_pages,
    check_products,
    check_rows,
    check_top_k,
    require,
    require_ends,
    require_ids,
)
from ess.kernels.cuda.triton import attend as attention
from ess.kernels.cuda.triton import grouped, index
from ess.kernels.cuda.triton import rows as codec_kernels
from ess.kernels.cuda.triton.launch import interpreted, require_device
from ess.kernels.merge import Pair, Partial, check_merge
from ess.kernels.reference import ops as reference
from ess.kernels.reference.ops import Keys, hadamard, has_stages, read_keys, write_keys
from ess.layout import IndexCodec, RowCodec, RowForm
from ess.units import PAGE_ROWS

PLAIN_FORMS: Final[dict[torch.dtype, RowForm]] = {torch.float32: "f32", torch.bfloat16: "bf16"}

__all__ = [
    "attend",
    "decode_rows",
    "encode_keys",
    "encode_rows",
    "expert_products",
    "hadamard",
    "has_stages",
    "implementation",
    "index_logits",
    "index_top_k",
    "merge",
    "read_keys",
    "require_device",
    "sparse_attention",
    "top_k",
    "write_keys",
]


def implementation() -> str:
    where = "interpreted" if interpreted() else torch.cuda.get_device_name()
    return f"triton {triton.__version__} on {where}"


def encode_rows(values: Tensor, codec: RowCodec, out: Tensor) -> Tensor:
    """Values [n, latent + rope], float32 or bfloat16, into rows [n, row_bytes]."""
    check_rows(values, codec, out)
    _require_device(values=values)
    _require_rows("out", out)
    return codec_kernels.encode_rows(_adjacent(values), codec, out)


def decode_rows(rows: Tensor, codec: RowCodec, out: Tensor) -> Tensor:
    """Rows [n, row_bytes] into values [n, latent + rope], float32 or bfloat16."""
    check_rows(out, codec, rows)
    _require_device(out=out)
    _require_rows("rows", rows)
    if out.stride(1) != 1:
        return out.copy_(codec_kernels.decode_rows(rows, codec, out.contiguous()))
    return codec_kernels.decode_rows(rows, codec, out)


def encode_keys(values: Tensor, codec: IndexCodec) -> Keys:
    """Keys [n, key_dim], float32 or bfloat16."""
    if codec.form == "f32":
        return reference.encode_keys(values, codec)
    require("values", values, (None, codec.key_dim), ("torch.float32", "torch.bfloat16"))
    _require_device(values=values)
    return Keys(*codec_kernels.encode_keys(_adjacent(values), codec))


def sparse_attention(
    queries: Tensor, rows: Tensor, slots: Tensor, *, latent_dim: int, scale: float
) -> Partial:
    """Over plain rows [slot, dim], encoded as they lie."""
    check_attention(queries, rows, slots, latent_dim)
    if rows.dtype not in PLAIN_FORMS or rows.shape[1] * rows.element_size() % 4:
        rows = rows.float()
    form = PLAIN_FORMS[rows.dtype]
    codec = RowCodec(form=form, latent_dim=latent_dim, rope_dim=rows.shape[1] - latent_dim)
    return attend(queries, _adjacent(rows).view(torch.uint8), slots, codec, scale=scale)


def attend(
    queries: Tensor,
    rows: Tensor,
    slots: Tensor,
    codec: RowCodec,
    *,
    scale: float,
    placed: Tensor | None = None,
    into: Partial | None = None,
    threads: int = 1,
) -> Partial:
    """By the contract of `reference.attend`; `placed` may be pinned memory of the host."""
    check_attend(queries, rows, slots, codec, placed, into)
    _require_device(queries=queries, slots=slots)
    _require_rows("rows", rows)
    if placed is not None:
        _require_rows("placed", placed, host=True)
    low = -1 if placed is None else -1 - len(placed)
    _require_in_range("slots", slots, low=low, limit=len(rows))
    partial = into or _new_partial(queries, codec.latent_dim)
    dense = Partial(*(tensor.contiguous() for tensor in partial))
    lists = attention.close_up(_adjacent(slots.to(torch.int32)))
    asked = _adjacent(_plain(queries))
    attention.attend_lists(asked, rows, lists, codec, scale=scale, placed=placed, into=dense)
    return _given_back(dense, partial)


def merge(first: Pair, second: Pair, *, into: Partial | None = None) -> Partial:
    """Any two (out, lse) pairs; `into` may be one of them."""
    first, second = check_merge(first, second, into)
    _require_device(first=first.lse, second=second.lse)
    sides = [Partial(*(tensor.contiguous() for tensor in side)) for side in (first, second)]
    partial = into or Partial(torch.empty_like(sides[0].out), torch.empty_like(sides[0].lse))
    dense = Partial(*(tensor.contiguous() for tensor in partial))
    return _given_back(attention.merge_into(sides[0], sides[1], dense), partial)


def index_logits(
    queries: Tensor,
    weights: Tensor,
    pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    codec: IndexCodec,
    *,
    out: Tensor | None = None,
    threads: int = 1,
) -> Tensor:
    check_pages(pages, codec)
    check_index(queries, weights, page_table, lengths, codec)
    _require_device(queries=queries, page_table=page_table, lengths=lengths)
    _require_rows("pages", pages)
    shape = len(queries), page_table.shape[1] * PAGE_ROWS
    _require_seen(page_table, lengths, page_count=len(pages))
    if out is not None:
        require("out", out, shape, SINGLE)
    target = torch.empty(shape, device=queries.device) if out is None else out
    dense = target if target.stride(1) == 1 else target.contiguous()
    asked = _adjacent(_plain(queries, keep=torch.float8_e4m3fn))
    ids = _adjacent(page_table.to(torch.int32)), lengths.to(torch.int32).contiguous()
    index.logits_into(asked, weights.contiguous(), pages, *ids, codec, out=dense)
    return target if dense is target else target.copy_(dense)


def index_top_k(
    queries: Tensor,
    weights: Tensor,
    pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    codec: IndexCodec,
    *,
    k: int,
    out: Tensor | None = None,
    threads: int = 1,
) -> Tensor:
    """`index_logits`, then `top_k`."""
    selection = _selection(len(queries), k, out, queries.device)
    logits = index_logits(queries, weights, pages, page_table, lengths, codec)
    return index.top_k_into(logits, lengths.to(torch.int32).contiguous(), out=selection)


def top_k(
    logits: Tensor, lengths: Tensor, *, k: int, out: Tensor | None = None, threads: int = 1
) -> Tensor:
    check_top_k(logits, lengths, k)
    _require_device(logits=logits, lengths=lengths)
    _require_in_range("lengths", lengths, low=0, limit=logits.shape[1] + 1)
    selection = _selection(len(logits), k, out, logits.device)
    counts = lengths.to(torch.int32).contiguous()
    return index.top_k_into(_adjacent(logits), counts, out=selection)


def expert_products(
    tokens: Tensor,
    ends: Tensor,
    weights: Tensor,
    *,
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    check_products(tokens, ends, weights, scales, out)
    _require_device(tokens=tokens, ends=ends, weights=weights)
    if scales is not None:
        _require_device(scales=scales)
    if not (weights.is_contiguous() and (scales is None or scales.is_contiguous())):
        raise BadInput(f"weights with strides {tuple(weights.stride())}, or scales, have gaps")
    if _looks():
        require_ends(ends.tolist(), count=len(tokens))
    made = tokens.new_zeros(len(tokens), weights.shape[1]) if out is None else out
    dense, given = _adjacent(made), ends.contiguous()
    grouped.products_into(_adjacent(tokens), given, weights, out=dense, scales=scales)
    return made if dense is made else made.copy_(dense)


def _selection(count: int, k: int, out: Tensor | None, device: torch.device) -> Tensor:
    if k < 1:
        raise BadInput(f"k is {k}, must be positive")
    if out is None:
        return torch.empty(count, k, dtype=torch.int32, device=device)
    require("out", out, (count, k), ("torch.int32",))
    if not out.is_contiguous():
        raise BadInput(f"out with strides {tuple(out.stride())} has gaps: copy it")
    return out


def _new_partial(queries: Tensor, dim: int) -> Partial:
    shape, device = queries.shape[:2], queries.device
    return Partial(torch.empty(*shape, dim, device=device), torch.empty(shape, device=device))


def _given_back(dense: Partial, asked: Partial) -> Partial:
    for target, source in zip(asked, dense, strict=True):
        if target is not source:
            target.copy_(source)
    return asked


def _adjacent(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _plain(queries: Tensor, *, keep: torch.dtype = torch.bfloat16) -> Tensor:
    return queries if queries.dtype in (torch.bfloat16, keep) else queries.float()


def _require_device(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device.type != "cuda" and not interpreted():
            raise BadInput(f"{name} is on {tensor.device}, the cuda ops need it on the device")


def _require_rows(name: str, matrix: Tensor, *, host: bool = False) -> None:
    """Bytes of a row side by side, every row at a multiple of 4: kernels read words."""
    if not (host and (interpreted() or matrix.is_pinned())):
        _require_device(**{name: matrix})
    if matrix.numel() and matrix.stride(1) != 1:
        raise BadInput(f"{name} steps {matrix.stride(1)} bytes within a row: copy it")
    if matrix.stride(0) % 4 or matrix.data_ptr() % 4:
        raise BadInput(f"{name} has rows {matrix.stride(0)} bytes apart, not a multiple of 4")


def _looks() -> bool:
    return interpreted() or not torch.cuda.is_current_stream_capturing()


def _require_in_range(name: str, ids: Tensor, *, low: int, limit: int) -> None:
    if ids.numel() and _looks():
        least, greatest = torch.stack(ids.aminmax()).tolist()
        require_ids(name, least, greatest, low=low, limit=limit)


def _require_seen(table: Tensor, lengths: Tensor, *, page_count: int) -> None:
    """Lengths within the table, and the pages they reach within the pool."""
    _require_in_range("lengths", lengths, low=0, limit=table.shape[1] * PAGE_ROWS + 1)
    if _looks():
        starts = torch.arange(0, table.shape[1] * PAGE_ROWS, PAGE_ROWS, device=table.device)
        seen = table[starts < lengths[:, None]]
        _require_in_range("page_table", seen, low=0, limit=page_count)
