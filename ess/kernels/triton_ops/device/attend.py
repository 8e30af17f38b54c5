"""Sparse attention over encoded rows, in two steps: lists closed up, then attended.

`close_up` copies the names of each list together, pads left out, and counts them. `attend` then
walks true lengths: a block of keys is full but for the last one, and what a query gets depends on
its rows and their order alone, not on pads, on other queries or on the grid.

A task is (query, split of its list, block of heads). The grid is any number of programs, each takes
every so manieth task, so a caller can leave multiprocessors to a copy kernel.

Rows lie in two matrices. The second is named by its distance from the first, in bytes: a device
that shares the host's addresses reads pinned host rows in place through the same loads.
"""

import triton
import triton.language as tl

from ess.kernels.triton_ops.device.floats import from_e4m3, widen
from ess.kernels.triton_ops.device.partials import LN2, LOG2E


@triton.jit
def close_up(slots, named, counts, width, slot_stride, BLOCK: tl.constexpr):
    query = tl.program_id(0).to(tl.int64)
    count = tl.zeros((), tl.int32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        slot = tl.load(slots + query * slot_stride + at, mask=at < width, other=-1)
        keep = slot != -1
        rank = tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(named + query * width + count + rank, slot, mask=keep)
        count += tl.sum(keep.to(tl.int32), 0)
    tl.store(counts + query, count)


@triton.jit
def _plain(
    starts, is_key, DIM: tl.constexpr, PADDED: tl.constexpr, FORM: tl.constexpr,
    IN_BF16: tl.constexpr,
):  # fmt: skip
    """DIM numbers that lie plainly from `starts` on: [keys, PADDED], zero beyond DIM."""
    column = tl.arange(0, PADDED)
    mask = is_key[:, None] & (column < DIM)[None, :]
    if FORM == "f32":
        at = starts.to(tl.pointer_type(tl.float32))[:, None] + column[None, :]
        found = tl.load(at, mask=mask, other=0.0)
    else:
        at = starts.to(tl.pointer_type(tl.int16))[:, None] + column[None, :]
        bits = tl.load(at, mask=mask, other=0)
        found = bits.to(tl.bfloat16, bitcast=True) if IN_BF16 else widen(bits)
    return found


@triton.jit
def _coded(
    starts, is_key, DIM: tl.constexpr, PADDED: tl.constexpr, IN_BF16: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """The same of e4m3: groups of 128 codes, and behind them all a scale for each group."""
    GROUPS: tl.constexpr = PADDED // 128
    group = tl.arange(0, GROUPS)
    mask = is_key[:, None, None] & (group < DIM // 128)[None, :, None]
    at = group[None, :, None] * 128 + tl.arange(0, 128)[None, None, :]
    codes = tl.load(starts[:, None, None] + at, mask=mask, other=0)
    at = (starts + DIM).to(tl.pointer_type(tl.float32))[:, None, None] + group[None, :, None]
    scales = tl.load(at, mask=mask, other=0.0)
    found = from_e4m3(codes, INTERPRETED) * scales
    found = found.to(tl.bfloat16) if IN_BF16 else found
    return tl.reshape(found, (starts.shape[0], PADDED))


@triton.jit
def _query(
    asking, is_head, DIM: tl.constexpr, PADDED: tl.constexpr, QUERY_IS_BF16: tl.constexpr,
    IN_BF16: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, PADDED)
    mask = is_head[:, None] & (column < DIM)[None, :]
    found = tl.load(asking[:, None] + column[None, :], mask=mask, other=0)
    if IN_BF16:
        values = found.to(tl.bfloat16, bitcast=True)
    else:
        values = widen(found) if QUERY_IS_BF16 else found
    return values


@triton.jit(do_not_specialize=["query_count"])
def attend(
    queries, rows, named, counts, out, lse,
    scale, placed_from, row_stride, placed_stride, query_stride, head_stride,
    query_count, heads, width, splits, split_keys,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, ROPE: tl.constexpr, ROPE_PADDED: tl.constexpr,
    ROPE_FROM: tl.constexpr, FORM: tl.constexpr, QUERY_IS_BF16: tl.constexpr,
    IN_BF16: tl.constexpr, INTERPRETED: tl.constexpr, PRECISION: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Writes out and lse [query, split, head]; a split behind the end of a list only if first.

    ADDS goes on from the partial that is there, as if its rows had been the first of the list: a
    list that is empty then costs nothing, and no second partial is ever written.
    """
    head_blocks = tl.cdiv(heads, HEADS)
    for task in range(tl.program_id(0), query_count * splits * head_blocks, tl.num_programs(0)):
        query = (task // head_blocks // splits).to(tl.int64)
        split = task // head_blocks % splits
        head = task % head_blocks * HEADS + tl.arange(0, HEADS)
        is_head = head < heads
        count = tl.load(counts + query)
        end = tl.minimum(count, (split + 1) * split_keys)
        is_live = is_head & (split * split_keys < count)
        asking = queries + query * query_stride + head * head_stride
        asked = _query(asking, is_live, DIM, DIM_PADDED, QUERY_IS_BF16, IN_BF16)
        if ROPE > 0:
            asked_rope = _query(asking + DIM, is_live, ROPE, ROPE_PADDED, QUERY_IS_BF16, IN_BF16)
        top = tl.full((HEADS,), -float("inf"), tl.float32)
        total = tl.zeros((HEADS,), tl.float32)
        sums = tl.zeros((HEADS, DIM_PADDED), tl.float32)
        if ADDS:
            top, sums = _go_on(out, lse, query * heads + head, is_live, DIM, sums)
            total = tl.where(top == -float("inf"), 0.0, 1.0)
        for first in range(split * split_keys, end, KEYS):
            key = first + tl.arange(0, KEYS)
            is_key = key < end
            slot = tl.load(named + query * width + key, mask=is_key, other=0).to(tl.int64)
            there = placed_from + (-2 - slot) * placed_stride
            starts = rows + tl.where(slot >= 0, slot * row_stride, there)
            if FORM == "fp8":
                values = _coded(starts, is_key, DIM, DIM_PADDED, IN_BF16, INTERPRETED)
            else:
                values = _plain(starts, is_key, DIM, DIM_PADDED, FORM, IN_BF16)
            logits = tl.dot(asked, tl.trans(values), input_precision=PRECISION)
            if ROPE > 0:
                rope = _plain(starts + ROPE_FROM, is_key, ROPE, ROPE_PADDED, FORM, IN_BF16)
                logits = tl.dot(asked_rope, tl.trans(rope), acc=logits, input_precision=PRECISION)
            logits = tl.where(is_key[None, :], logits * scale, -float("inf"))
            higher = tl.maximum(top, tl.max(logits, axis=1))
            level = tl.where(higher == -float("inf"), 0.0, higher)
            weights = tl.exp2((logits - level[:, None]) * LOG2E)
            fade = tl.exp2((top - level) * LOG2E)
            total = total * fade + tl.sum(weights, axis=1)
            kept = weights.to(tl.bfloat16) if IN_BF16 else weights
            sums = tl.dot(kept, values, acc=sums * fade[:, None], input_precision=PRECISION)
            top = higher
        _finish(
            out, lse, sums, total, top, (query * splits + split) * heads + head, is_head, count,
            split * split_keys, DIM, DIM_PADDED, ADDS,
        )  # fmt: skip


@triton.jit
def _go_on(out, lse, at, is_head, DIM: tl.constexpr, sums):
    column = tl.arange(0, sums.shape[1])
    mask = is_head[:, None] & (column < DIM)[None, :]
    sums = tl.load(out + (at[:, None] * DIM + column[None, :]), mask=mask, other=0.0)
    return tl.load(lse + at, mask=is_head, other=-float("inf")), sums


@triton.jit
def _finish(
    out, lse, sums, total, top, at, is_head, count, first,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, DIM_PADDED)
    is_written = is_head & ((first < count) | ((first == 0) & (not ADDS)))
    mean = tl.where(count > 0, sums / total[:, None], 0.0)
    mask = is_written[:, None] & (column < DIM)[None, :]
    tl.store(out + (at[:, None] * DIM + column[None, :]), mean, mask=mask)
    tl.store(lse + at, tl.where(count > 0, top + tl.log2(total) * LN2, top), mask=is_written)
