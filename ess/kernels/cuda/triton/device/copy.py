"""Rows from one matrix to another, row by row of two lists, by any number of programs."""

import triton
import triton.language as tl


@triton.jit
def copy_rows(
    source, target, source_rows, target_rows, count, source_stride, target_stride,
    WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Flat words of 8 bytes, so that no lane idles behind the end of a row; strides in words."""
    total = tl.load(count).to(tl.int64) * WORDS
    for start in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        word = start + tl.arange(0, BLOCK)
        mask = word < total
        pair = word // WORDS
        column = word % WORDS
        here = tl.load(source_rows + pair, mask=mask, other=0).to(tl.int64)
        there = tl.load(target_rows + pair, mask=mask, other=0).to(tl.int64)
        loaded = tl.load(source + (here * source_stride + column), mask=mask, other=0)
        tl.store(target + (there * target_stride + column), loaded, mask=mask)
