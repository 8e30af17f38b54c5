"""How large the exchanges of a device are: known to plans of memory too. Needs no torch."""

from __future__ import annotations

from typing import Final

from ess.units import div_ceil

CUT_TOKENS: Final = 128
"""How many tokens of a prompt a rank exchanges at a time."""
WORD_BYTES: Final = 4
WORDS: Final = 2
"""Numbers for each choice: its place and its weight."""


def cuts(chunk: int) -> list[range]:
    """
    >>> cuts(130)
    [range(0, 128), range(128, 130)]
    """
    return [range(first, min(first + CUT_TOKENS, chunk)) for first in range(0, chunk, CUT_TOKENS)]


def line_count(room: int, *, per_token: int, line_bytes: int) -> int:
    """Lines of so many bytes that a rank sends: tokens, then what is told of them.

    >>> line_count(2, per_token=8, line_bytes=64)
    4
    """
    return room + div_ceil(WORDS * WORD_BYTES * room * per_token, line_bytes)
