"""Partials that become one partial: of two calls, or of the pieces of a list."""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def merge(
    first_out, first_lse, second_out, second_lse, out, lse,
    WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One program per (query, head), by the words of `ess.kernels.merge`.

    Compiled without fused multiply-add: of two products it would round only one, and the sum would
    no longer be the same from both sides.
    """
    at = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    mask = column < WIDTH
    first, second = tl.load(first_lse + at), tl.load(second_lse + at)
    first_bits = tl.load(first_out + at * WIDTH + column, mask=mask, other=0.0)
    second_bits = tl.load(second_out + at * WIDTH + column, mask=mask, other=0.0)
    top = tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)
    first_weight = tl.exp2((first - top) * LOG2E)
    second_weight = tl.exp2((second - top) * LOG2E)
    total = first_weight + second_weight
    both = first_bits * tl.div_rn(first_weight, total)
    both += second_bits * tl.div_rn(second_weight, total)
    nothing = -float("inf")
    both = tl.where(second == nothing, first_bits, tl.where(first == nothing, second_bits, both))
    sum_lse = top + tl.log2(total) * LN2
    sum_lse = tl.where(second == nothing, first, tl.where(first == nothing, second, sum_lse))
    tl.store(out + at * WIDTH + column, both, mask=mask)
    tl.store(lse + at, sum_lse)


@triton.jit(do_not_specialize=["programs"])
def join(
    part_out, part_lse, cuts, out, lse, heads, programs,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, LINES: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    """Program (p, h) makes LINES heads of the list that is cut for the first time where share p
    begins.

    Its pieces are the last one of the program before p, and the first ones of p and of those after
    it whose shares begin within the list; they are added up in this order, with ADDS behind the
    partial that is there. `shares` says what a share is, and what `cuts` holds.
    """
    program = tl.program_id(0) + 1
    task, block = tl.load(cuts + 4 * program), tl.load(cuts + 4 * program + 1)
    before, before_block = tl.load(cuts + 4 * program - 4), tl.load(cuts + 4 * program - 3)
    if (block > 0) & ((before < task) | (before_block == 0)):
        line = tl.program_id(1) * LINES + tl.arange(0, LINES)
        head_blocks = tl.cdiv(heads, HEADS)
        head = task % head_blocks * HEADS + line
        is_head = (line < HEADS) & (head < heads)
        at = (task // head_blocks).to(tl.int64) * heads + head
        column = tl.arange(0, PADDED)[None, :]
        mask = is_head[:, None] & (column < WIDTH)
        top = tl.full((LINES,), -float("inf"), tl.float32)
        total = tl.zeros((LINES,), tl.float32)
        whole = tl.zeros((LINES, PADDED), tl.float32)
        if ADDS:
            top = tl.load(lse + at, mask=is_head, other=-float("inf"))
            total = tl.where(top == -float("inf"), 0.0, 1.0)
            whole = tl.load(out + (at[:, None] * WIDTH + column), mask=mask, other=0.0)
        part = 2 * (program - 1) + (before < task).to(tl.int32)
        goes_on = True
        while goes_on:
            piece = part.to(tl.int64) * HEADS + line
            level = tl.load(part_lse + piece, mask=is_head, other=0.0)
            given = tl.load(part_out + (piece[:, None] * WIDTH + column), mask=mask, other=0.0)
            higher = tl.maximum(top, level, propagate_nan=tl.PropagateNan.ALL)
            fade, weight = tl.exp2((top - higher) * LOG2E), tl.exp2((level - higher) * LOG2E)
            total = total * fade + weight
            whole = whole * fade[:, None] + weight[:, None] * given
            top = higher
            part = 2 * program
            goes_on = tl.load(cuts + 4 * program, mask=program < programs, other=-1) == task
            program += 1
        tl.store(out + (at[:, None] * WIDTH + column), whole / total[:, None], mask=mask)
        tl.store(lse + at, top + tl.log2(total) * LN2, mask=is_head)
