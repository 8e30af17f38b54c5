"""Index logits and the exact top-k, compiled: `ess_index_*` and `ess_top_k`.

fp8 keys under queries in fp8 or bfloat16 are multiplied in bfloat16, which holds both exactly; all
else is float32. What a query gets depends neither on other queries nor on the threads.
"""

from __future__ import annotations

import ctypes
from typing import Final

from torch import Tensor

from ess.kernels.calls import IndexQueries
from ess.kernels.checks import require_ids
from ess.kernels.cpu import records
from ess.kernels.cpu.attend import FORMS, QUERY_FORMS, Span, function, matrix, new_span, strides

_POINTER: Final = ctypes.c_void_p
_COUNT: Final = ctypes.c_int64
_RECORD: Final = ctypes.POINTER(records.Index)


def index_logits(call: IndexQueries, out: Tensor) -> None:
    run, span = function("ess_index_logits", _RECORD, _POINTER, _COUNT), new_span()
    fault = run(_record(call), out.data_ptr(), out.stride()[0], call.threads, span)
    _refuse(fault, span, width=call.width, page_count=call.pages.shape[0])


def index_top_k(call: IndexQueries, out: Tensor) -> None:
    run, span = function("ess_index_top_k", _RECORD, _COUNT, _POINTER), new_span()
    fault = run(_record(call), out.shape[1], out.data_ptr(), call.threads, span)
    _refuse(fault, span, width=call.width, page_count=call.pages.shape[0])


def index_scored(call: IndexQueries, out: Tensor) -> Tensor:
    logits = call.weights.new_empty(len(call.queries), call.width)
    index_logits(call, logits)
    top_k(logits, call.lengths, out, call.threads)
    return logits


def top_k(logits: Tensor, lengths: Tensor, out: Tensor, threads: int) -> None:
    run = function("ess_top_k", _POINTER, *[_COUNT] * 3, _POINTER, _COUNT, _POINTER)
    (count, width), span = logits.shape, new_span()
    lists = logits.data_ptr(), logits.stride()[0], width, count
    fault = run(*lists, lengths.data_ptr(), out.shape[1], out.data_ptr(), threads, span)
    _refuse(fault, span, width=width, page_count=0)


def _record(call: IndexQueries) -> records.Index:
    """It names memory of the call's tensors, which live as long as the call."""
    queries, weights, pages, table, lengths, codec, *_ = call
    return records.Index(
        *(*queries.shape, FORMS[codec.form], QUERY_FORMS[queries.dtype], *strides(queries)),
        *(table.shape[1], table.stride()[0], matrix(pages)),
        *(queries.data_ptr(), weights.data_ptr(), table.data_ptr(), lengths.data_ptr()),
    )


def _refuse(fault: int, span: Span, *, width: int, page_count: int) -> None:
    """Raises BadInput with the list of ids that the compiled function found out of range, and its
    span."""
    if fault == 1:
        require_ids("lengths", *span, low=0, limit=width + 1)
    if fault == 2:
        require_ids("page_table", *span, low=0, limit=page_count)
