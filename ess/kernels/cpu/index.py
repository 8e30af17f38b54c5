"""Index logits and the exact top-k, compiled: the doors of `ess_index_*` and `ess_top_k`.

fp8 keys under queries in fp8 or bfloat16 are multiplied in bfloat16, which holds both exactly; all
else is float32. What one query gets does not depend on the others, nor on the threads.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch import Tensor

from ess.errors import BadInput
from ess.kernels.checks import SINGLE, check_index, check_pages, check_top_k, require, require_ids
from ess.kernels.cpu.attend import (
    FORMS,
    QUERY_FORMS,
    Matrix,
    Span,
    byte_strides,
    dense,
    function,
    ids,
    matrix,
    new_span,
    require_host,
    require_threads,
)
from ess.layout import IndexCodec
from ess.units import PAGE_ROWS

_POINTER: Final = ctypes.c_void_p
_COUNT: Final = ctypes.c_int64


class _Call(ctypes.Structure):
    """`ess::Index` of csrc/cpu/kernels.h, field for field."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                *("query_count", "head_count", "key_dim", "key_form", "query_form"),
                *("query_stride", "head_stride", "table_width", "table_stride"),
            )
        ),
        ("pages", Matrix),
        *((name, _POINTER) for name in ("queries", "weights", "table", "lengths")),
    ]


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
    require_threads(threads)
    call, kept = _call(queries, weights, pages, page_table, lengths, codec)
    width = page_table.shape[1] * PAGE_ROWS
    if out is None:
        out = torch.empty(len(queries), width)
    require("out", out, (len(queries), width), SINGLE)
    require_host("out", out)
    span = new_span()
    run = function("ess_index_logits", ctypes.POINTER(_Call), _POINTER, _COUNT)
    fault = run(call, out.data_ptr(), out.stride(0), threads, span)
    _refuse(fault, span, width=width, page_count=len(pages))
    del kept
    return out


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
    require_threads(threads)
    call, kept = _call(queries, weights, pages, page_table, lengths, codec)
    out = _selection(len(queries), k, out)
    span = new_span()
    run = function("ess_index_top_k", ctypes.POINTER(_Call), _COUNT, _POINTER)
    fault = run(call, k, out.data_ptr(), threads, span)
    _refuse(fault, span, width=page_table.shape[1] * PAGE_ROWS, page_count=len(pages))
    del kept
    return out


def top_k(
    logits: Tensor, lengths: Tensor, *, k: int, out: Tensor | None = None, threads: int = 1
) -> Tensor:
    check_top_k(logits, lengths, k)
    require_threads(threads)
    require_host("logits", logits, is_adjacent=False)
    logits, lengths = dense(logits, QUERY_FORMS), ids("lengths", lengths)
    out = _selection(len(logits), k, out)
    span = new_span()
    run = function("ess_top_k", _POINTER, *[_COUNT] * 3, _POINTER, _COUNT, _POINTER)
    where = logits.data_ptr(), logits.stride(0), logits.shape[1], len(logits)
    fault = run(*where, lengths.data_ptr(), k, out.data_ptr(), threads, span)
    _refuse(fault, span, width=logits.shape[1], page_count=0)
    return out


def _call(
    queries: Tensor,
    weights: Tensor,
    pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    codec: IndexCodec,
) -> tuple[_Call, tuple[Tensor, ...]]:
    """The call, and the tensors whose memory it names."""
    check_pages(pages, codec)
    check_index(queries, weights, page_table, lengths, codec)
    queries, weights = dense(queries, QUERY_FORMS), weights.contiguous()
    table, counts = ids("page_table", page_table), ids("lengths", lengths)
    call = _Call(
        *(*queries.shape, FORMS[codec.form], QUERY_FORMS[queries.dtype]),
        *(*byte_strides(queries)[:2], table.shape[1], table.stride(0)),
        matrix("pages", pages),
        *(tensor.data_ptr() for tensor in (queries, weights, table, counts)),
    )
    return call, (queries, weights, table, counts)


def _selection(count: int, k: int, out: Tensor | None) -> Tensor:
    if k < 1:
        raise BadInput(f"k is {k}, must be positive")
    if out is None:
        return torch.empty(count, k, dtype=torch.int32)
    require("out", out, (count, k), ("torch.int32",))
    require_host("out", out, is_dense=True)
    return out


def _refuse(fault: int, span: Span, *, width: int, page_count: int) -> None:
    """The native door says which list of ids is out of range, and what it spans."""
    if fault == 1:
        require_ids("lengths", *span, low=0, limit=width + 1)
    if fault == 2:
        require_ids("page_table", *span, low=0, limit=page_count)
