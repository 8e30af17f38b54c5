"""Sparse attention over encoded rows and the merge of partials, compiled: their doors.

Same rows in the same order are the same bits, whatever pads lie between them, whichever of the two
matrices holds them, and whatever else is in the batch; the number of threads is no part of it.

Products are in bfloat16 where the machine has them and both sides are bfloat16 by nature (queries
of that type, rows in fp8 or bf16); otherwise in float32 with fused multiply-add. Sums are float32.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from ess.errors import BadInput
from ess.kernels.checks import check_attend, require_ids
from ess.kernels.cpu import native
from ess.kernels.merge import Pair, Partial, check_merge
from ess.layout import RowCodec

FORMS: Final = {"fp8": 0, "bf16": 1, "f32": 2}
QUERY_FORMS: Final = {torch.float8_e4m3fn: 0, torch.bfloat16: 1, torch.float32: 2}


Span = ctypes.Array[ctypes.c_int64]


class Matrix(ctypes.Structure):
    """`ess::Matrix` of csrc/cpu/kernels.h."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("count", ctypes.c_int64),
    ]


class _Call(ctypes.Structure):
    """`ess::Attend` of csrc/cpu/kernels.h, field for field."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                *("query_count", "head_count", "latent_dim", "rope_dim"),
                *("row_form", "query_form", "query_stride", "head_stride"),
                *("slot_count", "slot_stride"),
            )
        ),
        ("rows", Matrix),
        ("placed", Matrix),
        *((name, ctypes.c_void_p) for name in ("queries", "slots", "out", "lse")),
        ("scale", ctypes.c_float),
    ]


class _Merge(ctypes.Structure):
    """`ess::Merge` of csrc/cpu/kernels.h, field for field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("count", "dim")),
        *((name, ctypes.c_void_p * 2) for name in ("out", "lse")),
        *((name, ctypes.c_void_p) for name in ("into_out", "into_lse")),
    ]


@functools.cache
def function(name: str, *argument_types: Any) -> Callable[..., int]:
    """A call that answers with a fault and, in the last argument, the span of the ids."""
    types = [*argument_types, ctypes.c_int32, ctypes.POINTER(ctypes.c_int64)]
    return native.function(name, types, ctypes.c_int32)


def new_span() -> Span:
    return (ctypes.c_int64 * 2)()


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
    check_attend(queries, rows, slots, codec, placed, into)
    require_threads(threads)
    queries, slots = dense(queries, QUERY_FORMS), ids("slots", slots)
    count, heads = queries.shape[:2]
    if into is None:
        partial = Partial(torch.empty(count, heads, codec.latent_dim), torch.empty(count, heads))
    else:
        partial = into
        require_host("out", partial.out, is_dense=True)
        require_host("lse", partial.lse, is_dense=True)
    call = _Call(
        *(count, heads, codec.latent_dim, codec.rope_dim),
        *(FORMS[codec.form], QUERY_FORMS[queries.dtype], *byte_strides(queries)[:2]),
        *(slots.shape[1], slots.stride(0)),
        matrix("rows", rows),
        Matrix() if placed is None else matrix("placed", placed),
        *(tensor.data_ptr() for tensor in (queries, slots, *partial)),
        scale,
    )
    span = new_span()
    if function("ess_attend", ctypes.POINTER(_Call))(call, threads, span):
        low = -1 if placed is None else -1 - len(placed)
        require_ids("slots", *span, low=low, limit=len(rows))
    return partial


def merge(first: Pair, second: Pair, *, into: Partial | None = None) -> Partial:
    """Any two (out, lse) pairs; `into` may be one of them."""
    first, second = check_merge(first, second, into)
    sides = [tensor.contiguous() for tensor in (*first, *second)]
    into = into or Partial(torch.empty_like(sides[0]), torch.empty_like(sides[1]))
    for name, tensor in zip(("first", "second", "into"), (*sides[::2], into.out), strict=True):
        require_host(name, tensor)
    written = Partial(*(tensor.contiguous() for tensor in into))
    out, lse = ([side.data_ptr() for side in sides[at::2]] for at in (0, 1))
    call = _Merge(
        *(sides[1].numel(), first.out.shape[-1]),
        *((ctypes.c_void_p * 2)(*out), (ctypes.c_void_p * 2)(*lse)),
        *(tensor.data_ptr() for tensor in written),
    )
    _merge_function()(call)
    for target, source in zip(into, written, strict=True):
        if target is not source:
            target.copy_(source)
    return into


@functools.cache
def _merge_function() -> Callable[..., None]:
    return native.function("ess_merge", [ctypes.POINTER(_Merge)])


def matrix(name: str, rows: Tensor) -> Matrix:
    """Rows any distance apart; the bytes of one lie side by side."""
    require_host(name, rows)
    return Matrix(rows.data_ptr(), rows.stride(0), rows.shape[0])


def byte_strides(tensor: Tensor) -> list[int]:
    return [stride * tensor.element_size() for stride in tensor.stride()]


def dense(tensor: Tensor, dtypes: dict[torch.dtype, int]) -> Tensor:
    """The same tensor where kernels can read it, else a copy: float32 for any other type."""
    require_host("queries", tensor, is_adjacent=False)
    if tensor.dtype not in dtypes:
        tensor = tensor.float()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def ids(name: str, tensor: Tensor) -> Tensor:
    """As int32, the last axis dense; int64 is looked at first, so that nothing wraps."""
    require_host(name, tensor, is_adjacent=False)
    if tensor.dtype == torch.int64 and tensor.numel():
        ends = torch.iinfo(torch.int32)
        low, high = int(tensor.min()), int(tensor.max())
        require_ids(name, low, high, low=ends.min, limit=ends.max + 1)
    if tensor.dtype != torch.int32:
        tensor = tensor.to(torch.int32)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def require_threads(threads: int) -> None:
    if threads < 1:
        raise BadInput(f"threads is {threads}, must be positive")


def require_host(
    name: str, tensor: Tensor, *, is_adjacent: bool = True, is_dense: bool = False
) -> None:
    if not tensor.is_cpu:
        raise BadInput(f"{name} is on {tensor.device}, the cpu ops need it on the host")
    if is_adjacent and tensor.numel() and tensor.stride(-1) != 1:
        raise BadInput(f"{name} steps {tensor.stride(-1)} elements within a row: copy it")
    if is_dense and not tensor.is_contiguous():
        raise BadInput(f"{name} with strides {tuple(tensor.stride())} has gaps: copy it")
