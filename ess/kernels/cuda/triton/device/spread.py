"""The exact top-k of a few long lists, each shared out among programs; ascending, ties as `topk`.

The k-th greatest value is found byte by byte, upper ones first. A launch counts, of the values that
start with the bytes found so far, how many have which next byte; the one after it reads the next
byte of the answer from these counts. Then every chunk counts what it will take, and the last launch
takes it: with the counts of the chunks before its own, a program knows where to write.

Launches, not programs, wait for each other, and their number depends on nothing: a graph may replay
them. No guess is made, so all equal or all in one bin costs as much as anything else. Counts are
added up by integer atomics, whose order does not matter.
"""

import triton
import triton.language as tl

from ess.kernels.cuda.triton.device.floats import rising

BINS: tl.constexpr = tl.constexpr(256)


@triton.jit
def _known(known, tallies, k, LEVEL: tl.constexpr):
    """The upper LEVEL bytes of the k-th greatest, and how many values that start so are taken.

    What holds for a level less was left by the launch before; `known` has a pair for each level.
    """
    upper, wanted = tl.zeros((), tl.uint32), k
    if LEVEL > 1:
        upper = tl.load(known + 2 * (LEVEL - 2)).to(tl.uint32, bitcast=True)
        wanted = tl.load(known + 2 * (LEVEL - 2) + 1)
    if LEVEL > 0:
        value = tl.arange(0, BINS)
        counts = tl.load(tallies + (LEVEL - 1) * BINS + value)
        reached = tl.cumsum(counts, 0, reverse=True)
        byte = tl.sum((reached >= wanted).to(tl.int32), 0) - 1
        wanted -= tl.sum(tl.where(value > byte, counts, 0), 0)
        upper = (upper << 8) | byte.to(tl.uint32)
        if tl.program_id(1) == 0:
            tl.store(known + 2 * (LEVEL - 1), upper.to(tl.int32, bitcast=True))
            tl.store(known + 2 * (LEVEL - 1) + 1, wanted)
    return upper, wanted


@triton.jit(do_not_specialize_on_alignment=["lengths"])
def tally(
    logits, lengths, tallies, known, k, logit_stride, LEVEL: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    query, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK
    length = tl.load(lengths + query)
    if (length > k) & (first < length):
        tallies += query * 4 * BINS
        upper, _ = _known(known + query * 8, tallies, k, LEVEL)
        at = first + tl.arange(0, CHUNK)
        is_one = at < length
        seen = rising(tl.load(logits + query * logit_stride + at, mask=is_one, other=0.0))
        if LEVEL > 0:
            is_one = is_one & ((seen >> (32 - 8 * LEVEL)) == upper)
        byte = ((seen >> (24 - 8 * LEVEL)) & 255).to(tl.int32)
        counts = tl.histogram(byte, BINS, mask=is_one)
        place = tallies + LEVEL * BINS + tl.arange(0, BINS)
        tl.atomic_add(place, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["lengths"])
def census(logits, lengths, tallies, known, counts, k, logit_stride, CHUNK: tl.constexpr):
    """How many of a chunk are greater than the k-th, and how many equal it."""
    query, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK
    length = tl.load(lengths + query)
    if (length > k) & (first < length):
        bound, _ = _known(known + query * 8, tallies + query * 4 * BINS, k, 4)
        at = first + tl.arange(0, CHUNK)
        mask = at < length
        seen = rising(tl.load(logits + query * logit_stride + at, mask=mask, other=0.0))
        counts += 2 * (query * tl.num_programs(1) + tl.program_id(1))
        tl.store(counts, tl.sum(((seen > bound) & mask).to(tl.int32), 0))
        tl.store(counts + 1, tl.sum(((seen == bound) & mask).to(tl.int32), 0))


@triton.jit(do_not_specialize_on_alignment=["lengths"])
def take(
    logits, lengths, known, counts, out, k, logit_stride,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """A list that is no longer than k is taken whole, by the chunks that cover k."""
    query, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK
    length = tl.load(lengths + query)
    at = first + tl.arange(0, CHUNK)
    mask = at < length
    place, is_written = at, at < k
    if length > k:
        bound = tl.load(known + query * 8 + 6).to(tl.uint32, bitcast=True)
        wanted = tl.load(known + query * 8 + 7)
        seen = rising(tl.load(logits + query * logit_stride + at, mask=mask, other=0.0))
        chunk = tl.arange(0, CHUNKS)
        before = counts + 2 * (query * tl.num_programs(1) + chunk)
        is_before = (chunk < tl.program_id(1)) & (first < length)
        passed = tl.sum(tl.load(before + 1, mask=is_before, other=0), 0)
        written = tl.sum(tl.load(before, mask=is_before, other=0), 0) + tl.minimum(passed, wanted)
        is_equal = (seen == bound) & mask
        rank = passed + tl.cumsum(is_equal.to(tl.int32), 0) - 1
        is_written = ((seen > bound) & mask) | (is_equal & (rank < wanted))
        place = written + tl.cumsum(is_written.to(tl.int32), 0) - 1
    position = tl.where(mask, at, -1)
    tl.store(out + query * k + place, position, mask=is_written)
