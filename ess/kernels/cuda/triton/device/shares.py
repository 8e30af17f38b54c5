"""Which keys a program attends: an equal share of all blocks of keys, found by each alone.

Blocks stand in a row: query by query, and of a query head block by head block. A list has as many
as its keys fill, and at least one. Of n programs each takes the blocks from its share's beginning
to the next one's. A list that lies in one share is a whole. Where lists may be cut, a share begins
wherever it does, and a list over its edge is joined afterwards from the pieces of several programs.
Where they may not, a list is the program's in whose share it begins.

To begin a piece and to write what it gives costs as much as two or three blocks, so where there is
a list or more for each program, LIST_BLOCKS more stand in front of every list. They are no keys: a
share that begins among them begins with the list. Short lists are so shared out by their number,
long ones by their keys, and few short ones are cut.

Shares follow from the counts alone, so a graph that is replayed with other lists is as even.
"""

import triton
import triton.language as tl

SPAN: tl.constexpr = tl.constexpr(1024)
LIST_BLOCKS: tl.constexpr = tl.constexpr(2)


@triton.jit
def _blocks(counts, first, query_count, more, KEYS: tl.constexpr):
    query = first + tl.arange(0, SPAN)
    is_query = query < query_count
    count = tl.load(counts + query, mask=is_query, other=0)
    blocks = tl.maximum((count + (KEYS - 1)) // KEYS, 1)
    return tl.where(is_query, blocks + more, 0), is_query


@triton.jit
def _total(counts, query_count, KEYS: tl.constexpr):
    """Blocks of all lists, of one head block."""
    total = tl.zeros((), tl.int32)
    for first in range(0, query_count, SPAN):
        blocks, _ = _blocks(counts, first, query_count, 0, KEYS)
        total += tl.sum(blocks, 0)
    return total


@triton.jit
def _share(program, total, live):
    """Where the share of a program begins, given how many programs have a share."""
    even = total // live
    odd = total - even * live
    program = tl.minimum(program, live)
    return program * even + tl.minimum(program, odd)


@triton.jit
def _list_at(
    counts, place, query_count, head_blocks, more, KEYS: tl.constexpr, IS_CUT: tl.constexpr
):
    """Where a share begins: the list, by query and then head block, and the block of it. A list
    number after the last stands for no list."""
    query = tl.zeros((), tl.int32)
    start = tl.zeros((), tl.int32)
    blocks = tl.zeros((), tl.int32)
    before = tl.zeros((), tl.int32)
    for first in range(0, query_count, SPAN):
        counted, is_query = _blocks(counts, first, query_count, more, KEYS)
        ends = (before + tl.cumsum(counted, 0)) * head_blocks
        is_passed = is_query & (ends <= place)
        query += tl.sum(is_passed.to(tl.int32), 0)
        start = tl.maximum(start, tl.max(tl.where(is_passed, ends, 0), 0))
        begins = ends - counted * head_blocks
        is_its = is_query & (begins <= place) & (ends > place)
        blocks += tl.sum(tl.where(is_its, counted, 0), 0)
        before += tl.sum(counted, 0)
    within = place - start
    each = tl.maximum(blocks, 1)
    task, block = query * head_blocks + within // each, within % each
    if IS_CUT:
        block = tl.maximum(block - more, 0)
    else:
        task += (block > 0).to(tl.int32)
        block = tl.zeros((), tl.int32)
    return task, block


@triton.jit(do_not_specialize=["query_count"])
def lay_out(
    counts, cuts, pieces, query_count, head_blocks,
    KEYS: tl.constexpr, BLOCKS_MIN: tl.constexpr, IS_CUT: tl.constexpr,
):  # fmt: skip
    """Program p writes what program p of the attention does.

    cuts [p] is the list with which its share begins, the block of that list, and how many pieces
    there are. Piece n is pieces [n, p]: its list, its first key, the key behind its last, and where
    a part of a list goes, or -1 for a whole one. There are at most two such parts, of the first
    list in the share and of the last: 2 p and 2 p + 1. With few blocks few programs have any, but
    no list waits for another while a program has none.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    lists = query_count * head_blocks
    total = _total(counts, query_count, KEYS) * head_blocks
    live = tl.minimum(programs, tl.maximum(total // BLOCKS_MIN, lists))
    more = tl.where(lists >= live, LIST_BLOCKS, 0)
    total += lists * more
    begin, stop = _share(program, total, live), _share(program + 1, total, live)
    first, block = _list_at(counts, begin, query_count, head_blocks, more, KEYS, IS_CUT)
    last, last_block = _list_at(counts, stop, query_count, head_blocks, more, KEYS, IS_CUT)
    count = last - first + ((last_block > 0) & (begin < stop)).to(tl.int32)
    tl.store(cuts + 4 * program, first)
    tl.store(cuts + 4 * program + 1, block)
    tl.store(cuts + 4 * program + 2, count)
    for at in range(0, count, SPAN):
        number = at + tl.arange(0, SPAN)
        mask = number < count
        keys = tl.load(counts + (first + number) // head_blocks, mask=mask, other=0)
        start = tl.where(number == 0, block * KEYS, 0)
        is_cut = (first + number == last) & mask
        end = tl.where(is_cut, last_block * KEYS, keys)
        part = tl.where((start > 0) | is_cut, 2 * program + (number > 0), -1)
        piece = pieces + (number * programs + program) * 4
        tl.store(piece, first + number, mask=mask)
        tl.store(piece + 1, start, mask=mask)
        tl.store(piece + 2, end, mask=mask)
        tl.store(piece + 3, part, mask=mask)
