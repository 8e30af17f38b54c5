"""The exact top-k of each list of logits, ascending, by one program per list.

A list that is no longer than k is selected whole. A short list is read once and held: the k-th
greatest value is found bit by bit, by counting. Of a long one a sample says which value is likely a
little below the k-th greatest; what reaches it is copied together, in order, and searched instead.
The guess is checked: when fewer than k reach it or more than there is room for, the whole list is
searched, by four passes that count bytes. So a sample can cost time and never an answer.

Ties go to the lowest positions: all that is greater than the k-th value is taken, and of its equals
the first ones, as many as are missing.
"""

import triton
import triton.language as tl

from ess.kernels.cuda.triton.device.floats import rising


@triton.jit
def _nth_held(values, count, n, ROOM: tl.constexpr):
    """The n-th greatest of `count` values, as `rising` sees them, and how many are greater.

    They are read once and held in registers. What is behind the last is 0, which no value is.
    """
    at = tl.arange(0, ROOM)
    seen = rising(tl.load(values + at, mask=at < count, other=0.0))
    seen = tl.where(at < count, seen, 0)
    bound = tl.zeros((), tl.uint32)
    for bit in range(32):
        higher = bound | (tl.full((), 0x80000000, tl.uint32) >> bit)
        if tl.sum((seen >= higher).to(tl.int32), 0) >= n:
            bound = higher
    return bound, tl.sum((seen > bound).to(tl.int32), 0)


@triton.jit
def _nth(values, count, n, BLOCK: tl.constexpr):
    """The same of any number of values, byte by byte, upper ones first: four passes over them."""
    bound = tl.zeros((), tl.uint32)
    wanted = n
    byte_of = tl.arange(0, 256)
    for level in range(4):
        shift = 24 - 8 * level
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            seen = rising(tl.load(values + at, mask=at < count, other=0.0))
            is_so = (at < count) & ((seen >> shift >> 8) == (bound >> shift >> 8))
            byte = ((seen >> shift) & 255).to(tl.int32)
            counts += tl.histogram(byte, 256, mask=is_so)
        reached = tl.cumsum(counts, 0, reverse=True)
        byte = tl.sum((reached >= wanted).to(tl.int32), 0) - 1
        wanted -= tl.sum(tl.where(byte_of > byte, counts, 0), 0)
        bound |= byte.to(tl.uint32) << shift
    return bound, n - wanted


@triton.jit
def guess(values, length, k, SAMPLE: tl.constexpr):
    """A value that, by an even sample, somewhat more than k reach; 0 is reached by all."""
    at = (tl.arange(0, SAMPLE).to(tl.int64) * length // SAMPLE).to(tl.int32)
    seen = rising(tl.load(values + at))
    share = SAMPLE * (k / length)
    wanted = (share + 3.0 * tl.sqrt(share) + 8.0).to(tl.int32)
    bound = tl.zeros((), tl.uint32)
    for bit in range(32):
        higher = bound | (tl.full((), 0x80000000, tl.uint32) >> bit)
        if tl.sum((seen >= higher).to(tl.int32), 0) >= wanted:
            bound = higher
    return bound


@triton.jit
def gather_reaching(
    values, length, least, kept, positions, ROOM: tl.constexpr, BLOCK: tl.constexpr
):
    """Copies what reaches `least`, with its position; more than ROOM are counted only."""
    count = tl.zeros((), tl.int32)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < length
        value = tl.load(values + at, mask=mask, other=0.0)
        keep = (rising(value) >= least) & mask
        rank = count + tl.cumsum(keep.to(tl.int32), 0) - 1
        keep_here = keep & (rank < ROOM)
        tl.store(kept + rank, value, mask=keep_here)
        tl.store(positions + rank, at, mask=keep_here)
        count += tl.sum(keep.to(tl.int32), 0)
    return count


@triton.jit
def _select(values, positions, count, bound, equals, out, HAS_POSITIONS: tl.constexpr,
            BLOCK: tl.constexpr):  # fmt: skip
    """Writes the positions of the values above `bound`, and of the first values equal to it."""
    written = tl.zeros((), tl.int32)
    passed = tl.zeros((), tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < count
        seen = rising(tl.load(values + at, mask=mask, other=0.0))
        is_equal = (seen == bound) & mask
        rank = passed + tl.cumsum(is_equal.to(tl.int32), 0) - 1
        take = ((seen > bound) & mask) | (is_equal & (rank < equals))
        place = written + tl.cumsum(take.to(tl.int32), 0) - 1
        position = at
        if HAS_POSITIONS:
            position = tl.load(positions + at, mask=mask, other=0)
        tl.store(out + place, position, mask=take)
        passed += tl.sum(is_equal.to(tl.int32), 0)
        written += tl.sum(take.to(tl.int32), 0)


@triton.jit
def _fill(out, k, length, BLOCK: tl.constexpr):
    """The positions themselves as far as there are any, then -1."""
    for start in range(0, k, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(out + at, tl.where(at < length, at, -1), mask=at < k)


@triton.jit(do_not_specialize_on_alignment=["lengths"])
def top_k(
    logits, lengths, out, kept, positions, k, logit_stride,
    ROOM: tl.constexpr, SAMPLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + query)
    values, out = logits + query * logit_stride, out + query * k
    kept, positions = kept + query * ROOM, positions + query * ROOM
    if length <= k:
        _fill(out, k, length, BLOCK)
    elif length <= ROOM:
        bound, greater = _nth_held(values, length, k, ROOM)
        _select(values, positions, length, bound, k - greater, out, False, BLOCK)
    else:
        least = guess(values, length, k, SAMPLE)
        count = gather_reaching(values, length, least, kept, positions, ROOM, BLOCK)
        tl.debug_barrier()
        if (count >= k) & (count <= ROOM):
            bound, greater = _nth_held(kept, count, k, ROOM)
            _select(kept, positions, count, bound, k - greater, out, True, BLOCK)
        else:
            bound, greater = _nth(values, length, k, BLOCK)
            _select(values, positions, length, bound, k - greater, out, False, BLOCK)
