"""Which keys a program attends: an equal share of all blocks of keys, found by each alone.

Blocks stand in a row: query by query, and of a query head block by head block. A list has as many
as its keys fill, and at least one. Of n programs each takes the blocks from its share's beginning
to the next one's. A list that lies in one share is a whole. Where lists may be cut, a share begins
wherever it does, and a list over its edge is joined afterwards from the pieces of several programs.
Where they may not, a list is the program's in whose share it begins.

Shares follow from the counts alone, so a graph that is replayed with other lists is as even.
"""

import triton
import triton.language as tl

SPAN: tl.constexpr = tl.constexpr(1024)


@triton.jit
def _blocks(counts, first, query_count, KEYS: tl.constexpr):
    query = first + tl.arange(0, SPAN)
    is_query = query < query_count
    count = tl.load(counts + query, mask=is_query, other=0)
    blocks = tl.maximum((count + (KEYS - 1)) // KEYS, 1)
    return tl.where(is_query, blocks, 0), is_query


@triton.jit
def _total(counts, query_count, KEYS: tl.constexpr):
    """Blocks of all lists, of one head block."""
    total = tl.zeros((), tl.int32)
    for first in range(0, query_count, SPAN):
        blocks, _ = _blocks(counts, first, query_count, KEYS)
        total += tl.sum(blocks, 0)
    return total


@triton.jit
def _share(program, total, programs, BLOCKS_MIN: tl.constexpr):
    """Where a program's share begins. With few blocks, few programs have any."""
    live = tl.maximum(tl.minimum(programs, total // BLOCKS_MIN), 1)
    even = total // live
    odd = total - even * live
    program = tl.minimum(program, live)
    return program * even + tl.minimum(program, odd)


@triton.jit
def task_at(counts, place, query_count, head_blocks, KEYS: tl.constexpr):
    """The list of a block, by query and then head block, the block's number in it, and how many it
    has. Behind the last block is a list that there is not, without any."""
    query = tl.zeros((), tl.int32)
    start = tl.zeros((), tl.int32)
    blocks = tl.zeros((), tl.int32)
    before = tl.zeros((), tl.int32)
    for first in range(0, query_count, SPAN):
        here, is_query = _blocks(counts, first, query_count, KEYS)
        ends = (before + tl.cumsum(here, 0)) * head_blocks
        is_passed = is_query & (ends <= place)
        query += tl.sum(is_passed.to(tl.int32), 0)
        start = tl.maximum(start, tl.max(tl.where(is_passed, ends, 0), 0))
        begins = ends - here * head_blocks
        is_its = is_query & (begins <= place) & (ends > place)
        blocks += tl.sum(tl.where(is_its, here, 0), 0)
        before += tl.sum(here, 0)
    within = place - start
    each = tl.maximum(blocks, 1)
    return query * head_blocks + within // each, within % each, blocks


@triton.jit(do_not_specialize=["query_count"])
def lay_out(
    counts, cuts, pieces, query_count, head_blocks,
    KEYS: tl.constexpr, BLOCKS_MIN: tl.constexpr, IS_CUT: tl.constexpr,
):  # fmt: skip
    """Program p writes what program p of the attention does.

    Piece n is pieces [n, p]: its list, its first key, the key behind its last, and where a part of
    a list goes, or -1 for a whole one. There are at most two such parts, of the first list in the
    share and of the last: 2 p and 2 p + 1. cuts [p] is where the share begins, from where to where
    the list goes that is cut there (from -1 if none is), and how many pieces there are.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    total = _total(counts, query_count, KEYS) * head_blocks
    begin = _share(program, total, programs, BLOCKS_MIN)
    stop = _share(program + 1, total, programs, BLOCKS_MIN)
    first, first_block, blocks = task_at(counts, begin, query_count, head_blocks, KEYS)
    last, last_block, _ = task_at(counts, stop - 1, query_count, head_blocks, KEYS)
    is_inside = (begin < stop) & (first_block > 0)
    if not IS_CUT:
        first += (first_block > 0).to(tl.int32)
    count = tl.where(begin < stop, last + 1 - first, 0)
    tl.store(cuts + 4 * program, begin)
    tl.store(cuts + 4 * program + 1, tl.where(is_inside, begin - first_block, -1))
    tl.store(cuts + 4 * program + 2, begin - first_block + blocks)
    tl.store(cuts + 4 * program + 3, count)
    for at in range(0, count, SPAN):
        number = at + tl.arange(0, SPAN)
        mask = number < count
        keys = tl.load(counts + (first + number) // head_blocks, mask=mask, other=0)
        start = tl.zeros_like(keys)
        end = keys
        if IS_CUT:
            start = tl.where(number == 0, first_block * KEYS, 0)
            is_last = number + 1 == count
            end = tl.where(is_last, tl.minimum(keys, (last_block + 1) * KEYS), keys)
        part = tl.where((start > 0) | (end < keys), 2 * program + (number > 0), -1)
        piece = pieces + (number * programs + program) * 4
        tl.store(piece, first + number, mask=mask)
        tl.store(piece + 1, start, mask=mask)
        tl.store(piece + 2, end, mask=mask)
        tl.store(piece + 3, part, mask=mask)
