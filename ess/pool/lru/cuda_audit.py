"""The findings of an audit of a group on a device, in words; the kernel is audit.cu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

SENTENCES: Final = (
    "(a block) is no block of the slab, or not above the one before it",
    "holds an impossible row id",
    "holds a row whose slot_of points elsewhere",
    "was last used after the step",
    "is dirty and in flight",
    "is free but dirty or in flight",
    "has a negative ticket",
    "(a row) has a slot that holds another row",
)
KINDS: Final = len(SENTENCES)
FINDINGS: Final = 2 + 2 * KINDS
NONE_FOUND: Final = 2**31 - 1


def assert_sound(findings: Sequence[int]) -> None:
    """`findings`: used slots, resident rows, then the count and the least place of each kind."""
    assert len(findings) == FINDINGS, f"{len(findings)} numbers for {KINDS} kinds"
    used, resident, *kinds = findings
    counts, first = kinds[:KINDS], kinds[KINDS:]
    for count, where, sentence in zip(counts, first, SENTENCES, strict=True):
        assert count == 0, f"{where} {sentence} ({count} in all)"
    assert used == resident, f"{resident} rows have slots, {used} slots of the group have rows"
