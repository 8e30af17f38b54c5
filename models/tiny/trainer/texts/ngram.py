"""A 5-gram model over the same tokens: the bar that a neural model has to clear.

Interpolated Kneser-Ney with one discount per order. A token has 12 bits, so an n-gram of up to
five is exact in 60 bits of one integer: the model is five sorted arrays of keys and counts, and
looking a text up is five binary searches. Lower orders count in how many contexts an n-gram was
seen, not how often; that is what makes their backing-off right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput

TOKEN_BITS: Final = 12
ORDER: Final = 5

Keys = npt.NDArray[np.int64]
Counts = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Level:
    """One order: its n-grams, and per context the sum of counts and the number of followers."""

    grams: Keys
    counts: Counts
    contexts: Keys
    totals: Counts
    followers: Counts
    discount: float


def gram_keys(tokens: npt.NDArray[np.uint16], order: int) -> Keys:
    """The key of the n-gram that ends at each position from `order - 1` on."""
    wide = tokens.astype(np.int64)
    keys = wide[: wide.size - order + 1].copy()
    for at in range(1, order):
        keys = (keys << TOKEN_BITS) | wide[at : wide.size - order + 1 + at]
    return keys


def _level(grams: Keys, counts: Counts) -> Level:
    contexts, starts = np.unique(grams >> TOKEN_BITS, return_index=True)
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return Level(
        grams=grams,
        counts=counts,
        contexts=contexts,
        totals=np.add.reduceat(counts, starts),
        followers=np.diff(np.append(starts, grams.size)).astype(np.float64),
        discount=once / (once + 2 * twice) if once else 0.5,
    )


def train(tokens: npt.NDArray[np.uint16], *, order: int = ORDER) -> list[Level]:
    """Levels 1..order. The highest counts occurrences, the others distinct tokens before."""
    if tokens.size < order:
        raise BadInput(f"{tokens.size} tokens are too few for order {order}")
    if int(tokens.max()) >> TOKEN_BITS:
        raise BadInput(f"token {int(tokens.max())} needs more than {TOKEN_BITS} bits")
    grams, counted = np.unique(gram_keys(tokens, order), return_counts=True)
    levels = [_level(grams, counted.astype(np.float64))]
    for size in range(order - 1, 0, -1):
        mask = (1 << (TOKEN_BITS * size)) - 1
        grams, counted = np.unique(grams & mask, return_counts=True)
        levels.append(_level(grams, counted.astype(np.float64)))
    return levels[::-1]


def _look(keys: Keys, sorted_keys: Keys, values: Counts) -> Counts:
    at = np.minimum(np.searchsorted(sorted_keys, keys), sorted_keys.size - 1)
    return np.where(sorted_keys[at] == keys, values[at], 0.0)


def _probability(levels: list[Level], tokens: npt.NDArray[np.uint16], vocabulary: int) -> Counts:
    """The probability of every token, given up to four before it."""
    chance = np.full(tokens.size, 1.0 / vocabulary)
    for order, level in enumerate(levels, start=1):
        keys = gram_keys(tokens, order)
        contexts = keys >> TOKEN_BITS
        total = _look(contexts, level.contexts, level.totals)
        seen = np.maximum(_look(keys, level.grams, level.counts) - level.discount, 0.0)
        left = level.discount * _look(contexts, level.contexts, level.followers)
        known = total > 0
        lower = chance[order - 1 :]
        mixed = (seen + left * lower) / np.where(known, total, 1.0)
        chance[order - 1 :] = np.where(known, mixed, lower)
    return chance


def bits(
    levels: list[Level], tokens: npt.NDArray[np.uint16], *, vocabulary: int = 1 << TOKEN_BITS
) -> Counts:
    """Bits to encode each token, the first ones with shorter contexts."""
    return np.asarray(-np.log2(_probability(levels, tokens, vocabulary)))
