"""Sparse attention over encoded rows, in two steps: lists closed up, then attended.

`close_up` copies the names of each list together, pads left out, and counts them. `attend` then
walks true lengths: a block of keys is full but for the last one, and what a query gets depends on
its rows and their order alone, not on pads, on other queries or on the grid.

Programs share all blocks of keys out evenly, for any number of programs, so a caller can leave
multiprocessors to a copy kernel: `shares` says how.

Rows lie in two matrices. The second is named by its distance from the first, in bytes: a device
that shares the host's addresses reads pinned host rows in place through the same loads.

What the compiler for sm_90 makes of this is the reason for its form (Triton 3.6; the tests count):
- An operand goes to shared memory, where the tensor cores read it, only if it comes straight from a
  load. bfloat16 is therefore loaded through a pointer to bfloat16 and never cast from bits: queries
  cast from bits are carried in 128 registers a thread, and every product then waits for the last.
- Names are loaded one block ahead and carried. Rows then hang on one load and not on two, and with
  three stages they are under way while the block before them is computed. Left to itself, Triton
  asks for rows at the end of a block and waits for them at the start of the next.
- Rows begin at multiples of ALIGNED bytes, and the kernel says so: Triton 3.8 and 3.9 do not see it
  through the choice between two matrices, and would load rows word by word, without copies ahead.
- What stands in `pieces` is read again behind the loop over keys instead of being held through it,
  and laid out by another kernel: with that in front of it the loop spilled.
- Products that feed another product are given to all warps by rows, of which 64 heads have work for
  half of them: the other half repeats it. `_logits` hides the chain behind branches.
"""

import triton
import triton.language as tl

from ess.kernels.cuda.triton.device.floats import from_e4m3, widen
from ess.kernels.cuda.triton.device.partials import LN2, LOG2E


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
        loaded = tl.load(at, mask=mask, other=0.0)
    elif IN_BF16:
        at = starts.to(tl.pointer_type(tl.bfloat16))[:, None] + column[None, :]
        loaded = tl.load(at, mask=mask, other=0.0)
    else:
        at = starts.to(tl.pointer_type(tl.int16))[:, None] + column[None, :]
        loaded = widen(tl.load(at, mask=mask, other=0))
    return loaded


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
    loaded = from_e4m3(codes, INTERPRETED) * scales
    loaded = loaded.to(tl.bfloat16) if IN_BF16 else loaded
    return tl.reshape(loaded, (starts.shape[0], PADDED))


@triton.jit
def _query(
    asking, is_head, DIM: tl.constexpr, PADDED: tl.constexpr, QUERY_IS_BF16: tl.constexpr,
    IN_BF16: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, PADDED)
    mask = is_head[:, None] & (column < DIM)[None, :]
    if IN_BF16:
        at = asking.to(tl.pointer_type(tl.bfloat16))[:, None] + column[None, :]
        values = tl.load(at, mask=mask, other=0.0)
    else:
        loaded = tl.load(asking[:, None] + column[None, :], mask=mask, other=0)
        values = widen(loaded) if QUERY_IS_BF16 else loaded
    return values


@triton.jit
def _names(named, first, end, KEYS: tl.constexpr):
    key = first + tl.arange(0, KEYS)
    return tl.load(named + key, mask=key < end, other=0)


@triton.jit
def _starts(rows, slot, placed_from, row_stride, placed_stride, ALIGNED: tl.constexpr):
    slot = slot.to(tl.int64)
    placed = placed_from + (-2 - slot) * placed_stride
    return rows + tl.multiple_of(tl.where(slot >= 0, slot * row_stride, placed), ALIGNED)


@triton.jit
def _logits(asked, values, asked_rope, rope, first, end, PRECISION: tl.constexpr):
    """The logits of a block that exists: both conditions hold, which the compiler cannot know.

    A result that leaves a branch counts as unchained, so the warps share a product out by columns
    too. The branch that is never taken holds a product as well: were it cheap, Triton would move
    the softmax behind it into every layout that is asked for.
    """
    logits = tl.zeros((asked.shape[0], values.shape[0]), tl.float32)
    if end > 0:
        logits = tl.dot(asked_rope, tl.trans(rope), acc=logits, input_precision=PRECISION)
    if first < end:
        logits = tl.dot(asked, tl.trans(values), acc=logits, input_precision=PRECISION)
    else:
        logits = tl.dot(asked_rope, tl.trans(rope), acc=logits, input_precision=PRECISION)
    return logits


@triton.jit
def attend(
    queries, rows, named, cuts, pieces, out, lse,
    scale, placed_from: tl.int64, part_from: tl.int64, part_lse_from: tl.int64,
    row_stride, placed_stride, query_stride, head_stride, heads, width,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, ROPE: tl.constexpr, ROPE_PADDED: tl.constexpr,
    ROPE_FROM: tl.constexpr, FORM: tl.constexpr, QUERY_IS_BF16: tl.constexpr,
    IN_BF16: tl.constexpr, INTERPRETED: tl.constexpr, PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Writes out and lse [query, head] of every list that is whole in `pieces`, which `shares` lays
    out; the part of a cut list lies behind `out` and `lse`, that many numbers away.

    ADDS goes on from the partial that is there, as if its rows had been the first of the list: a
    list that is empty then costs nothing, and no second partial is ever written. A list in pieces
    leaves that to the join.
    """
    head_blocks = tl.cdiv(heads, HEADS)
    count = tl.load(cuts + 4 * tl.program_id(0) + 2)
    for number in range(tl.program_id(0), count * tl.num_programs(0), tl.num_programs(0)):
        piece = pieces + number * 4
        task, start = tl.load(piece), tl.load(piece + 1)
        end = tl.load(piece + 2) - start
        query = (task // head_blocks).to(tl.int64)
        head = task % head_blocks * HEADS + tl.arange(0, HEADS)
        is_live = (head < heads) & (end > 0)
        asking = queries + query * query_stride + head * head_stride
        asked = _query(asking, is_live, DIM, DIM_PADDED, QUERY_IS_BF16, IN_BF16)
        if ROPE > 0:
            asked_rope = _query(asking + DIM, is_live, ROPE, ROPE_PADDED, QUERY_IS_BF16, IN_BF16)
        top = tl.full((HEADS,), -float("inf"), tl.float32)
        total_weight = tl.zeros((HEADS,), tl.float32)
        sums = tl.zeros((HEADS, DIM_PADDED), tl.float32)
        if ADDS:
            line = query * heads + task % head_blocks * HEADS
            is_on = is_live & (tl.load(piece + 3) < 0)
            top, sums = _go_on(out + line * DIM, lse + line, is_on, DIM, DIM_PADDED)
            total_weight = tl.where(top == -float("inf"), 0.0, 1.0)
        listed = named + (query * width + start)
        slot = _names(listed, 0, end, KEYS)
        for first in range(0, end, KEYS):
            is_key = first + tl.arange(0, KEYS) < end
            starts = _starts(rows, slot, placed_from, row_stride, placed_stride, ALIGNED)
            slot = _names(listed, first + KEYS, end, KEYS)
            if FORM == "fp8":
                values = _coded(starts, is_key, DIM, DIM_PADDED, IN_BF16, INTERPRETED)
            else:
                values = _plain(starts, is_key, DIM, DIM_PADDED, FORM, IN_BF16)
            if ROPE > 0:
                rope = _plain(starts + ROPE_FROM, is_key, ROPE, ROPE_PADDED, FORM, IN_BF16)
                logits = _logits(asked, values, asked_rope, rope, first, end, PRECISION)
            else:
                logits = tl.dot(asked, tl.trans(values), input_precision=PRECISION)
            logits = tl.where(is_key[None, :], logits * scale, -float("inf"))
            higher = tl.maximum(top, tl.max(logits, axis=1))
            level = tl.where(higher == -float("inf"), 0.0, higher)
            weights = tl.exp2((logits - level[:, None]) * LOG2E)
            fade = tl.exp2((top - level) * LOG2E)
            total_weight = total_weight * fade + tl.sum(weights, axis=1)
            kept = weights.to(tl.bfloat16) if IN_BF16 else weights
            sums = tl.dot(kept, values, acc=sums * fade[:, None], input_precision=PRECISION)
            top = higher
        line_at, lse_at, head, is_any = _places(
            piece, heads, head_blocks, part_from, part_lse_from, DIM, HEADS
        )
        is_written = (head < heads) & (is_any | (not ADDS))
        mean = sums * (1.0 / tl.where(is_any, total_weight, 1.0))[:, None]
        top = tl.where(is_any, top + tl.log2(total_weight) * LN2, top)
        at, mask = _out(is_written, DIM, DIM_PADDED)
        tl.store(out + line_at + at, mean, mask=mask)
        tl.store(lse + lse_at + tl.arange(0, HEADS), top, mask=is_written)


@triton.jit
def _places(
    piece, heads, head_blocks, part_from, part_lse_from, DIM: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """Where the lines of a whole list start, or those of a part, and where their lse; which heads
    these are, and whether there was any key."""
    task, part = tl.load(piece, volatile=True), tl.load(piece + 3, volatile=True)
    is_any = tl.load(piece + 1, volatile=True) < tl.load(piece + 2, volatile=True)
    first = task % head_blocks * HEADS
    line = (task // head_blocks).to(tl.int64) * heads + first
    line_at = tl.where(part < 0, line * DIM, part_from + part.to(tl.int64) * (HEADS * DIM))
    lse_at = tl.where(part < 0, line, part_lse_from + part.to(tl.int64) * HEADS)
    return line_at, lse_at, first + tl.arange(0, HEADS), is_any


@triton.jit
def _out(is_head, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Steps of int32 from one place: the compiler folds them into the loads and stores."""
    head, column = tl.arange(0, is_head.shape[0]), tl.arange(0, PADDED)
    mask = is_head[:, None]
    if DIM < PADDED:
        mask = mask & (column < DIM)[None, :]
    return head[:, None] * DIM + column[None, :], mask


@triton.jit
def _go_on(out, lse, is_head, DIM: tl.constexpr, PADDED: tl.constexpr):
    at, mask = _out(is_head, DIM, PADDED)
    sums = tl.load(out + at, mask=mask, other=0.0)
    head = tl.arange(0, is_head.shape[0])
    return tl.load(lse + head, mask=is_head, other=-float("inf")), sums
