"""Marks in a growing text: which comes first, and how much to hold back.

The outcome must not depend on the pieces in which the text arrives. So the first mark is the one
that is complete first (of several that end together, the longest), which is what reading character
by character would find; and the end of the text is held back as far as it may still become a mark.
"""

from __future__ import annotations

from collections.abc import Sequence


def first_mark(text: str, marks: Sequence[str]) -> tuple[int, str] | None:
    """Where the first mark begins, and which it is."""
    ends = [(at + len(mark), at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(ends)[1:] if ends else None


def held_chars(text: str, marks: Sequence[str]) -> int:
    """The length of the longest end of `text` that begins a mark; `text` contains none."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for count in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-count:]) for mark in marks):
            return count
    return 0
