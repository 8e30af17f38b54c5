"""Partials that become one partial: of two calls, or of the splits of a call."""

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


@triton.jit
def join(
    part_out, part_lse, counts, out, lse, heads, splits, split_keys,
    WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """One program per (query, head) over the splits of its list, in their order.

    A split that starts behind the end of the list was never written, so it is not read.
    """
    query, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, PADDED)
    mask = column < WIDTH
    live = tl.cdiv(tl.load(counts + query), split_keys)
    top = -float("inf")
    for split in range(live):
        lse_here = tl.load(part_lse + (query * splits + split) * heads + head)
        top = tl.maximum(top, lse_here, propagate_nan=tl.PropagateNan.ALL)
    total = tl.zeros((), tl.float32)
    whole = tl.zeros((PADDED,), tl.float32)
    for split in range(live):
        at = (query * splits + split) * heads + head
        weight = tl.exp2((tl.load(part_lse + at) - top) * LOG2E)
        total += weight
        whole += weight * tl.load(part_out + at * WIDTH + column, mask=mask, other=0.0)
    at = query * heads + head
    tl.store(out + at * WIDTH + column, tl.where(live > 0, whole / total, 0.0), mask=mask)
    tl.store(lse + at, tl.where(live > 0, top + tl.log2(total) * LN2, -float("inf")))
