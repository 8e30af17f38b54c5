"""Which layout DeepGEMM chooses for a dense product in fp8 on Hopper, by two of its versions.

A layout is all of the choice that its program is compiled for. Written after
`csrc/jit_kernels/heuristics` of 38f8ef7 (blocks by waves) and 54e2261 (blocks by estimated cycles).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from ess.units import align_up, div_ceil

SMS = 132
SHARED_BYTES = 232448
DEPTH = 128


class Layout(NamedTuple):
    """Tokens and columns of a block, blocks of a cluster along each, multiprocessors."""

    tokens: int
    columns: int
    beside: int = 1
    below: int = 1
    sms: int = SMS


Choose = Callable[[int, int, int], Layout]


def heights(m: int) -> tuple[int, ...]:
    return (64, 128, 256, *(few for few in (16, 32) if m <= few))


def by_waves(m: int, n: int, k: int) -> Layout:
    """Fewest waves, then the fullest last one, then the smaller or wider block."""
    best, waves, filled = Layout(0, 0), 0, 0
    for tokens in heights(m):
        for columns in range(16, 257, 16):
            if columns > 128 and (tokens > 128 or columns not in (144, 160, 192)):
                continue
            blocks = div_ceil(m, tokens) * div_ceil(n, columns)
            count, last = div_ceil(blocks, SMS), blocks % SMS or SMS
            is_wider = columns > best.columns and columns <= n and tokens <= m
            is_better = not waves or count < waves or (count == waves and last > filled)
            if count == waves and last == filled:
                is_better = (
                    (tokens == best.tokens and columns < best.columns)
                    or (columns == best.columns and tokens < best.tokens)
                    or (tokens != best.tokens and is_wider)
                )
            if is_better:
                best, waves, filled = Layout(tokens, columns), count, last
    clusters = (1, 1)
    if m >= 512:
        clusters = (2, 1) if best.tokens > best.columns else (1, 2)
    blocks = div_ceil(m, best.tokens) * div_ceil(n, best.columns)
    return Layout(*best[:2], *clusters, align_up(div_ceil(blocks, waves), max(clusters)))


def by_cycles(m: int, n: int, k: int) -> Layout:
    return min(_candidates(heights(m), k), key=lambda layout: _cycles(layout, m, n, k))


@functools.cache
def _candidates(heights: tuple[int, ...], k: int) -> list[Layout]:
    made = []
    for clusters in ((1, 1), (1, 2), (2, 1)):
        for tokens in heights:
            for columns in range(16, 193, 16):
                over = columns - DEPTH
                is_uneven = over > 0 and columns % over != 0 and DEPTH % over != 0
                if is_uneven or (tokens > 128 and columns > 128):
                    continue
                stages = _stages(tokens, columns, k)
                if stages >= (4 if tokens * columns < 128 * 192 else 3):
                    made.append(Layout(tokens, columns, *clusters))
    return made


def _stages(tokens: int, columns: int, k: int) -> int:
    scales = div_ceil(k, DEPTH) * 4 * (1 if DEPTH % columns == 0 else 2)
    fixed = align_up(tokens * columns * 2, 1024) + 256 + align_up(scales, 8)
    each = (tokens + columns) * DEPTH + align_up(tokens * 4, 128)
    return min((SHARED_BYTES - fixed) // each, 16)


def _cycles(layout: Layout, m: int, n: int, k: int) -> float:
    """What bounds it of two levels of cache, over the part of the last wave that is filled."""
    tokens, columns, beside, below, _ = layout
    blocks = div_ceil(m, tokens) * div_ceil(n, columns)
    waves = div_ceil(blocks, SMS)
    if beside * below > 1 and waves <= 1:
        return float(1 << 62)
    out = tokens * columns * 2
    far = k * (tokens // below + columns // beside) + out
    near = k * (tokens + columns) + k * (max(64, tokens) + columns) + 2 * out
    far_cycles, near_cycles = far * blocks // 6153, near * blocks // (128 * SMS)
    return float(int(max(far_cycles, near_cycles) / (blocks / (waves * SMS))))


VERSIONS: tuple[Choose, ...] = (by_waves, by_cycles)
