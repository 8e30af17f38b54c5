"""Index logits over paged keys: a page is 64 keys' values, then their 64 scales."""

import triton
import triton.language as tl

from ess.kernels.triton_ops.device.floats import from_e4m3, widen


@triton.jit
def _keys(
    starts, place, is_key, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, IS_FP8: tl.constexpr,
    IN_BF16: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The keys at places of the pages that start there, [keys, DIM_PADDED], and their scales."""
    column = tl.arange(0, DIM_PADDED)
    mask = is_key[:, None] & (column < DIM)[None, :]
    if IS_FP8:
        codes = starts[:, None] + (place[:, None] * DIM + column[None, :])
        found = from_e4m3(tl.load(codes, mask=mask, other=0), INTERPRETED)
        keys = found.to(tl.bfloat16) if IN_BF16 else found
        at = (starts + 64 * DIM).to(tl.pointer_type(tl.float32)) + place
        scales = tl.load(at, mask=is_key, other=0.0)
    else:
        plain = starts.to(tl.pointer_type(tl.float32))[:, None]
        keys = tl.load(plain + (place[:, None] * DIM + column[None, :]), mask=mask, other=0.0)
        scales = tl.full(place.shape, 1.0, tl.float32)
    return keys, scales


@triton.jit
def _query(queries, at, mask, FORM: tl.constexpr, IN_BF16: tl.constexpr,
           INTERPRETED: tl.constexpr):  # fmt: skip
    found = tl.load(queries + at, mask=mask, other=0)
    if FORM == "f32":
        values = found
    elif FORM == "bf16":
        values = found.to(tl.bfloat16, bitcast=True) if IN_BF16 else widen(found)
    else:
        values = from_e4m3(found, INTERPRETED)
        values = values.to(tl.bfloat16) if IN_BF16 else values
    return values


@triton.jit(do_not_specialize=["query_count", "table_width"])
def logits(
    queries, weights, pages, table, lengths, out,
    query_stride, head_stride, page_stride, table_stride, out_stride, query_count, table_width,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    IS_FP8: tl.constexpr, QUERY_FORM: tl.constexpr, IN_BF16: tl.constexpr,
    INTERPRETED: tl.constexpr, PRECISION: tl.constexpr, RUN: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A task is a query and RUN keys of it; the grid is any number of programs.

    Sums of a product stay in float32: keys and queries of e4m3 are multiplied as bfloat16, which
    holds both, because the tensor cores add products of e4m3 in less than float32.
    """
    head, column = tl.arange(0, HEADS_PADDED), tl.arange(0, DIM_PADDED)
    width = table_width * 64
    runs = tl.cdiv(width, RUN)
    for task in range(tl.program_id(0), query_count * runs, tl.num_programs(0)):
        query = (task // runs).to(tl.int64)
        run = task % runs * RUN
        length = tl.load(lengths + query)
        at = query * query_stride + head[:, None].to(tl.int64) * head_stride + column[None, :]
        mask = (head < HEADS)[:, None] & (column < DIM)[None, :]
        asked = _query(queries, at, mask, QUERY_FORM, IN_BF16, INTERPRETED)
        weight = tl.load(weights + query * HEADS + head, mask=head < HEADS, other=0.0)
        for first in range(run, tl.minimum(run + RUN, width), KEYS):
            key = first + tl.arange(0, KEYS)
            is_key = key < length
            page = tl.load(table + query * table_stride + key // 64, mask=is_key, other=0)
            starts = pages + page.to(tl.int64) * page_stride
            keys, scales = _keys(
                starts, key % 64, is_key, DIM, DIM_PADDED, IS_FP8, IN_BF16, INTERPRETED
            )
            dots = tl.dot(asked, tl.trans(keys), input_precision=PRECISION)
            dots = tl.where(dots < 0, 0.0, dots) * weight[:, None]
            dots = tl.where((head < HEADS)[:, None], dots, 0.0)
            found = tl.where(is_key, tl.sum(dots, axis=0) * scales, -float("inf"))
            tl.store(out + query * out_stride + key, found, mask=key < width)
