"""Index logits over paged keys: a page is 64 keys' values, then their 64 scales."""

import triton
import triton.language as tl

from ess.kernels.cuda.triton.device.floats import from_e4m3, operand


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
        loaded = from_e4m3(tl.load(codes, mask=mask, other=0), INTERPRETED)
        keys = loaded.to(tl.bfloat16) if IN_BF16 else loaded
        at = (starts + 64 * DIM).to(tl.pointer_type(tl.float32)) + place
        scales = tl.load(at, mask=is_key, other=0.0)
    else:
        plain = starts.to(tl.pointer_type(tl.float32))[:, None]
        keys = tl.load(plain + (place[:, None] * DIM + column[None, :]), mask=mask, other=0.0)
        scales = tl.full(place.shape, 1.0, tl.float32)
    return keys, scales


@triton.jit
def _pages(table, first, length, KEYS: tl.constexpr):
    key = first + tl.arange(0, KEYS)
    return tl.load(table + key // 64, mask=key < length, other=0)


@triton.jit(
    do_not_specialize=["table_stride", "request_count", "each", "table_width", "run_keys"],
    do_not_specialize_on_alignment=["table", "lengths"],
)
def logits(
    queries, weights, pages, table, lengths, out,
    query_stride, head_stride, page_stride, table_stride, out_stride,
    request_count, each, table_width, run_keys,
    HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    IS_FP8: tl.constexpr, QUERY_FORM: tl.constexpr, IN_BF16: tl.constexpr,
    INTERPRETED: tl.constexpr, PRECISION: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A task is a request and run_keys of its keys; the grid is any number of programs.

    The queries of a request, `each` of at most GROUP, are columns of one product: keys are read and
    widened once for all of them, and what one of them gets is what it would get alone. They share
    their pages, so the last one's row of the table is read for all.

    Keys are the rows of the product and go to it from registers; a sum over heads then stays within
    four threads. Pages are loaded one block ahead, as names are in attention.

    Sums of a product stay in float32: keys and queries of e4m3 are multiplied as bfloat16, which
    holds both, because the tensor cores add products of e4m3 in less than float32.
    """
    row, column = tl.arange(0, GROUP * HEADS_PADDED), tl.arange(0, DIM_PADDED)
    head, member = row % HEADS_PADDED, tl.arange(0, GROUP)
    is_row = (head < HEADS) & (row // HEADS_PADDED < each)
    width = table_width * 64
    runs = tl.cdiv(width, run_keys)
    for task in range(tl.program_id(0), request_count * runs, tl.num_programs(0)):
        first_query = (task // runs).to(tl.int64) * each
        run = task % runs * run_keys
        query = first_query + row // HEADS_PADDED
        at = query[:, None] * query_stride + head[:, None].to(tl.int64) * head_stride
        is_asked = is_row[:, None] & (column < DIM)[None, :]
        asked = operand(
            queries + (at + column[None, :]), is_asked, QUERY_FORM, IN_BF16, INTERPRETED
        )
        weight = tl.load(weights + query * HEADS + head, mask=is_row, other=0.0)
        length = tl.load(lengths + first_query + member, mask=member < each, other=0)
        end = tl.minimum(run + run_keys, width)
        live = tl.minimum(end, tl.max(length, axis=0))
        places = out + (first_query + member) * out_stride
        listed = table + (first_query + each - 1) * table_stride
        page = _pages(listed, run, live, KEYS)
        for first in range(run, live, KEYS):
            key = first + tl.arange(0, KEYS)
            starts = pages + page.to(tl.int64) * page_stride
            page = _pages(listed, first + KEYS, live, KEYS)
            keys, scales = _keys(
                starts, key % 64, key < live, DIM, DIM_PADDED, IS_FP8, IN_BF16, INTERPRETED
            )
            dots = tl.dot(keys, tl.trans(asked), input_precision=PRECISION)
            dots = tl.where(dots < 0, 0.0, dots) * weight[None, :]
            dots = tl.where(is_row[None, :], dots, 0.0)
            total = tl.sum(tl.reshape(dots, (KEYS, GROUP, HEADS_PADDED)), axis=2)
            mask = (key < live)[:, None] & (key[:, None] < length[None, :])
            tl.store(places[None, :] + key[:, None], total * scales[:, None], mask=mask)
