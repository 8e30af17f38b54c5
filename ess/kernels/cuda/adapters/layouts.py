"""Which numbers of tokens meet all layouts of DeepGEMM's products.

It compiles a program for each layout that it meets first, for some seconds. So that no request
waits for that, products of these numbers are made before there are requests.
"""

from __future__ import annotations

from typing import Final

SINGLE_BLOCKS: Final = (16, 32)
"""Tokens of the blocks that are chosen only where one of them holds all tokens."""
BLOCKS: Final = (64, 128, 256)
CLUSTERED: Final = 512
"""Tokens from which on versions before 54e2261 join blocks to clusters."""


def counts_to_build(count_max: int) -> list[int]:
    """Numbers of tokens that meet each layout which any number from 1 to `count_max` meets.

    Its choice, in versions from 79f48ee to 54e2261, knows the number of tokens in three ways: how
    many blocks hold them; whether a block is no larger than they are; whether they are 512. So all
    numbers between two of these limits have one layout, and the last of them stands for them.

    For products of experts this is the number that an expert is expected to have: of it the choice
    knows no more.
    """
    fills = *SINGLE_BLOCKS, *range(BLOCKS[0], count_max + BLOCKS[0], BLOCKS[0])
    below = (limit - 1 for limit in (*SINGLE_BLOCKS, *BLOCKS, CLUSTERED))
    return sorted({min(last, count_max) for last in (*fills, *below)})
