"""What top-k, top-p and min-p leave of a line of scores, by one program, without a sort.

In the order of the sort (greatest first, equals by id) a token is kept while fewer than k come
before it, their shares are less than top-p of those that top-k leaves, and it reaches the floor.
All three only ever change from kept to dropped along the order, so there is a least value that the
first token of its equals is kept for: the pivot. It is searched by digits of four bits. For each,
how many tokens are above its values and what their shares sum to is counted anew; shares are whole
numbers, so the sums are exact in any order. Of the pivot's equals the first ones are kept, by the
same rule.

A line is long and what is kept is mostly short. So a sample says which value a few thousand tokens
are likely to reach, these are copied together, and they are searched in the place of the line. This
is checked: if the pivot might be lower, or there is no room, the line itself is searched. A sample
can cost time and never an answer.

Where the greatest score is no finite number there are no shares, and the first token with that
score is kept. For a line of a greedy request nothing is written.
"""

import triton
import triton.language as tl

from ess.kernels.cuda.triton.device.floats import falling, rising
from ess.kernels.cuda.triton.device.topk import gather_reaching, guess

LOWEST = tl.constexpr(0x007FFFFF)
HIGHEST = tl.constexpr(0xFF800000)


@triton.jit
def _share(value, best):
    """2^44 for the best, by what every device rounds alike: see `ess.kernels.reference.cut`."""
    doublings = tl.maximum((value - best) * 1.4426950408889634, -45.0)
    doublings = tl.where(doublings > -1e-30, 0.0, doublings)
    whole = tl.floor(doublings)
    part = doublings - whole - 0.5
    made = part * 2.157062300896799e-05 + 0.00021783881590746446
    made = made * part + 0.0018856498765369369
    made = made * part + 0.013602088628663626
    made = made * part + 0.07849466324122069
    made = made * part + 0.3397315841830749
    made = made * part + 0.9802581434685472
    made = made * part + 1.4142135623730951
    power = (whole.to(tl.int32) + 171) << 23
    return (made * power.to(tl.float32, bitcast=True)).to(tl.int64)


@triton.jit
def _above(values, count, bound, best, BLOCK: tl.constexpr):
    """How many are above the bound, and their shares."""
    greater = tl.zeros((), tl.int32)
    shares = tl.zeros((), tl.int64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(values + at, mask=at < count, other=float("-inf"))
        is_above = (rising(value) > bound) & (at < count)
        greater += tl.sum(is_above.to(tl.int32), 0)
        shares += tl.sum(tl.where(is_above, _share(value, best), 0), 0)
    return greater, shares


@triton.jit
def _pivot(values, count, k, allowed, floor, best, BLOCK: tl.constexpr):
    """The least value, as `rising` sees it, that is kept where it comes first of its equals: a
    digit of four bits is the number of digits whose greatest value is not kept."""
    digit = tl.arange(0, 16).to(tl.uint32)
    pivot = tl.zeros((), tl.uint32)
    for level in range(8):
        shift = 28 - 4 * level
        bounds = pivot + ((digit + 1) << shift) - 1
        greater = tl.zeros((16,), tl.int32)
        shares = tl.zeros((16,), tl.int64)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            value = tl.load(values + at, mask=at < count, other=float("-inf"))
            is_above = (rising(value)[None, :] > bounds[:, None]) & (at < count)[None, :]
            greater += tl.sum(is_above.to(tl.int32), 1)
            shares += tl.sum(tl.where(is_above, _share(value, best)[None, :], 0), 1)
        is_kept = (greater < k) & (shares.to(tl.float64) < allowed) & (bounds >= floor)
        pivot += tl.sum(1 - is_kept.to(tl.int32), 0).to(tl.uint32) << shift
    return pivot


@triton.jit
def _search(values, count, k, top_p, total, floor, best, width, BLOCK: tl.constexpr,
            PART: tl.constexpr):  # fmt: skip
    """The pivot, how many are above it with what shares, and how much is allowed."""
    left = total
    if k < width:
        none = tl.zeros((), tl.uint32)
        last = _pivot(values, count, k, float("inf"), none, best, PART)
        greater, left = _above(values, count, last, best, BLOCK)
        left += (k - greater) * _share(falling(last), best)
    allowed = top_p.to(tl.float64) * left.to(tl.float64)
    pivot = _pivot(values, count, k, allowed, floor, best, PART)
    greater, shares = _above(values, count, pivot, best, BLOCK)
    return pivot, greater, shares, allowed


@triton.jit
def _greatest(values, count, BLOCK: tl.constexpr):
    best = tl.zeros((), tl.uint32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        seen = rising(tl.load(values + at, mask=at < count, other=float("-inf")))
        best = tl.maximum(best, tl.max(tl.where(at < count, seen, 0), 0))
    return best


@triton.jit
def _keep(values, out, count, pivot, greater, shares, k, allowed, best,
          BLOCK: tl.constexpr):  # fmt: skip
    """What is above the pivot, and its first equals as far as they are kept."""
    equal_share = _share(falling(pivot), best)
    passed = tl.zeros((), tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < count
        value = tl.load(values + at, mask=mask, other=float("-inf"))
        seen = rising(value)
        is_equal = (seen == pivot) & mask
        before = passed + tl.cumsum(is_equal.to(tl.int32), 0) - 1
        spent = (shares + before.to(tl.int64) * equal_share).to(tl.float64)
        is_kept = (seen > pivot) | (is_equal & (greater + before < k) & (spent < allowed))
        tl.store(out + at, tl.where(is_kept, value, float("-inf")), mask=mask)
        passed += tl.sum(is_equal.to(tl.int32), 0)


@triton.jit(do_not_specialize_on_alignment=["top_k", "top_p"])
def cut(
    scores, top_k, top_p, log_min_p, out, kept, positions,
    width, score_stride, out_stride,
    ROOM: tl.constexpr, SAMPLE: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    if tl.load(top_k + line) == 0:
        return
    values, out = scores + line * score_stride, out + line * out_stride
    kept, positions = kept + line * ROOM, positions + line * ROOM
    k = tl.minimum(tl.load(top_k + line), width).to(tl.int32)
    share = tl.load(top_p + line)
    pivot = _greatest(values, width, BLOCK)
    best = falling(pivot)
    greater = tl.zeros((), tl.int32)
    shares = tl.zeros((), tl.int64)
    allowed = tl.full((), float("inf"), tl.float64)
    if (pivot <= LOWEST) | (pivot >= HIGHEST):
        k = tl.full((), 1, tl.int32)
    else:
        floor = tl.maximum(rising(best + tl.load(log_min_p + line)), LOWEST + 1)
        pivot = floor
        if (k < width) | (share < float("inf")):
            total = shares
            if k == width:
                none = tl.zeros((), tl.uint32)
                greater, total = _above(values, width, none, best, BLOCK)
            count = width
            reaches = False
            if width > ROOM:
                least = guess(values, width, ROOM // 2, SAMPLE)
                count = gather_reaching(values, width, least, kept, positions, ROOM, BLOCK)
                tl.debug_barrier()
                if count <= ROOM:
                    none = tl.zeros((), tl.uint32)
                    greater, shares = _above(kept, count, none, best, BLOCK)
                    is_over = shares.to(tl.float64) >= share.to(tl.float64) * total.to(tl.float64)
                    is_over = is_over | (floor >= least)
                    reaches = tl.where(k < width, count >= k, is_over)
            if reaches:
                pivot, greater, shares, allowed = _search(
                    kept, count, k, share, total, floor, best, width, BLOCK, PART
                )
            else:
                pivot, greater, shares, allowed = _search(
                    values, width, k, share, total, floor, best, width, BLOCK, PART
                )
    _keep(values, out, width, pivot, greater, shares, k, allowed, best, BLOCK)
