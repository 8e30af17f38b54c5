"""The models that a plan's workers may have, and prompts that are around pages of each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ess.models.model import Model
from ess.units import PAGE_ROWS
from tests.compressed import world
from tests.support.checkpoints import small, tokens

LENGTHS: Final = (1, 2, 30, 64, 65, 90, 128, 129, 150, 180, 190, 200)
NEAR: Final = 8


@dataclass(frozen=True, slots=True)
class Family:
    """`row_tokens` are those of a row: prompts are as many times as long."""

    model: Callable[[], Model]
    vocabulary: int
    row_tokens: int = 1


FAMILIES: Final = {
    "small": Family(small, 512),
    "deepseek_v4": Family(world.tiny, 96, row_tokens=4),
}


@functools.cache
def prompts(family: str) -> list[list[int]]:
    """Every other one begins as the longest does; one, but for the last token of its first page."""
    own = FAMILIES[family]
    lengths = [length * own.row_tokens for length in LENGTHS]
    longest = tokens(max(lengths), own.vocabulary, seed=3)
    made = [
        longest[:length] if number % 2 else tokens(length, own.vocabulary, seed=number)
        for number, length in enumerate(lengths)
    ]
    made[NEAR] = longest[: lengths[NEAR]]
    made[NEAR][PAGE_ROWS * own.row_tokens - 1] ^= 1
    return made


@functools.cache
def others(family: str) -> list[list[int]]:
    """Prompts of the same lengths."""
    vocabulary = FAMILIES[family].vocabulary
    lengths = [len(prompt) for prompt in prompts(family)]
    return [tokens(length, vocabulary, seed=100 + length) for length in lengths]
