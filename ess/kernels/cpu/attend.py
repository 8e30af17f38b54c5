"""Sparse attention over encoded rows and the merge of partials, compiled.

Same rows in the same order are the same bits, whatever pads lie between them, whichever of the two
matrices holds them, and whatever else is in the batch; the number of threads is no part of it.

Products are in bfloat16 where the machine has them and both sides are bfloat16 by nature (queries
of that type, rows in fp8 or bf16); otherwise in float32 with fused multiply-add. Sums are float32.
In bfloat16 the weights are rounded, to the same whichever rows share a partial, and lse is that of
weights as rounded, up to 2^-8 from the exact: so a merge gives what one pass over all rows gives,
but for the order of float32 sums.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from ess.kernels.calls import Attend, slot_range
from ess.kernels.checks import require_ids
from ess.kernels.cpu import native, records
from ess.kernels.cpu.records import Matrix
from ess.kernels.merge import Partial

FORMS: Final = {"fp8": 0, "bf16": 1, "f32": 2, "fp8_64": 3}
QUERY_FORMS: Final = {torch.float8_e4m3fn: 0, torch.bfloat16: 1, torch.float32: 2}
NOTHING: Final = Matrix()

Span = ctypes.Array[ctypes.c_int64]


@functools.cache
def function(name: str, *argument_types: Any) -> Callable[..., int]:
    """A call that answers with a fault and, in the last argument, the span of the ids."""
    types = [*argument_types, ctypes.c_int32, ctypes.POINTER(ctypes.c_int64)]
    return native.function(name, types, ctypes.c_int32)


def new_span() -> Span:
    return (ctypes.c_int64 * 2)()


def attend(call: Attend) -> None:
    if call.adds:
        return call.in_two(attend, merge)
    queries, rows, slots, codec, scale, placed, into, threads, *_ = call
    count, heads, _ = queries.shape
    record = records.Attend(
        *(count, heads, codec.latent_dim, codec.rope_dim),
        *(FORMS[codec.form], QUERY_FORMS[queries.dtype], *strides(queries)),
        *(slots.shape[1], slots.stride()[0], codec.plain_dim),
        *(matrix(rows), NOTHING if placed is None else matrix(placed)),
        *(queries.data_ptr(), slots.data_ptr(), into.out.data_ptr(), into.lse.data_ptr()),
        scale,
    )
    span = new_span()
    if function("ess_attend", ctypes.POINTER(records.Attend))(record, threads, span):
        low, limit = slot_range(rows, placed)
        require_ids("slots", *span, low=low, limit=limit)


def merge(first: Partial, second: Partial, into: Partial) -> None:
    record = records.Merge(
        *(into.lse.numel(), into.out.shape[-1]),
        (first.out.data_ptr(), second.out.data_ptr()),
        (first.lse.data_ptr(), second.lse.data_ptr()),
        *(into.out.data_ptr(), into.lse.data_ptr()),
    )
    _merge()(record)


@functools.cache
def _merge() -> Callable[..., None]:
    return native.function("ess_merge", [ctypes.POINTER(records.Merge)])


def matrix(rows: Tensor) -> Matrix:
    return Matrix(rows.data_ptr(), rows.stride()[0], rows.shape[0])


def strides(queries: Tensor) -> tuple[int, int]:
    """From query to query and from head to head, in bytes."""
    size, (queries_step, heads_step, _) = queries.element_size(), queries.stride()
    return queries_step * size, heads_step * size
