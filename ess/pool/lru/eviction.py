"""Which row gives way: the policies of an arena, as arrays and in the order they are argued.

What `specification` says of victims holds under every policy: free slots go first, the lowest
first; a used slot goes only if this step has not selected its row and the row is neither dirty nor
in flight. Of those that may go, the policy says which:

    lru     the longest unused, up to 255 steps; then the lowest slot.
    score   the lowest rank; then the lowest slot. The rank of a row follows what the indexer gives
            it in every step, selected or not: a quarter of the way, in whole numbers. A row that
            was never scored takes its first score whole. Ranks are kept by row, so a row that comes
            back has not been forgotten; a row id that is dropped has.
    sieve   a hand walks from the oldest admission to the newest and on from the oldest. It takes
            the first row that was not selected since it came, or since the hand last passed it, and
            spares the others once. Where none is left it goes round again and takes what it spared.
An indexer's logits have no unit, so `scored` scales them by the selection they led to: its least
logit becomes `SCORE_FLOOR`, its greatest 255; all others are on that line, or cut off at 0 and 255.
These are comparisons and one multiplication in float32, so every implementation gets the same
bytes.

This module decides; `specification` changes rows. Ages are kept under every policy: warming and the
miss curve need them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput

PolicyName = Literal["lru", "sieve", "score"]
POLICIES: Final[tuple[PolicyName, ...]] = get_args(PolicyName)

SCORE_FLOOR: Final = 128
SCORE_MAX: Final = 255
SCORE_SHIFT: Final = 2

Longs = npt.NDArray[np.int64]


@dataclass(slots=True, kw_only=True, eq=False)
class Eviction:
    """A policy by name and its arrays; the arrays of the other policies are empty.

    came[slot]    -> the number of the admission, one count per group   (sieve)
    spared[slot]  -> the step of admission or of the hand's last pass   (sieve)
    hand          -> where the walk goes on, and the next admission     (sieve)
    rank_of[row]  -> 256 times the average of its scores, 0: none yet   (score)

    `came` and `spared` are indexed by slab slot, like `last_use`; groups of a slab may share them.
    """

    name: PolicyName = "lru"
    came: Longs = field(default_factory=lambda: np.empty(0, np.int64))
    spared: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    hand: Longs = field(default_factory=lambda: np.empty(0, np.int64))
    rank_of: npt.NDArray[np.uint16] = field(default_factory=lambda: np.empty(0, np.uint16))

    @property
    def number(self) -> int:
        return POLICIES.index(self.name)


@dataclass(slots=True, eq=False)
class Evictions:
    """The policy of every group of one slab."""

    name: PolicyName
    slot_count: int
    row_count: int
    _came: Longs = field(init=False)
    _spared: npt.NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        check_policy(self.name)
        count = self.slot_count if self.name == "sieve" else 0
        self._came, self._spared = np.zeros(count, np.int64), np.zeros(count, np.int32)

    def begin_anew(self, last_use: npt.NDArray[np.int32], *, by: int, least: int) -> None:
        """Step numbers shrink by `by`, to `least` at the lowest; `last_use` still has the old
        numbers. Whether a slot's row was selected since the hand passed it does not change."""
        if self.name != "sieve":
            return
        visited = last_use > self._spared
        used, spared = (np.maximum(each - np.int32(by), least) for each in (last_use, self._spared))
        self._spared[:] = np.where(visited, np.minimum(spared, used - 1), spared)

    def group(self) -> Eviction:
        return Eviction(
            name=self.name,
            came=self._came,
            spared=self._spared,
            hand=np.zeros(2 if self.name == "sieve" else 0, np.int64),
            rank_of=np.zeros(self.row_count if self.name == "score" else 0, np.uint16),
        )


def check_policy(evict: str) -> None:
    if evict not in POLICIES:
        raise BadInput(f"evict is {evict!r}, must be one of {', '.join(POLICIES)}")


def scored(logits: npt.NDArray[np.float32], selection: npt.NDArray[np.int32]) -> Longs:
    """The scores 0..255 of one query's logits; `selection` names the greatest of them."""
    chosen = logits[selection[selection >= 0]]
    floor = np.fmin.reduce(chosen, initial=np.float32(np.inf))
    span = np.fmax.reduce(chosen, initial=np.float32(-np.inf)) - floor
    with np.errstate(all="ignore"):
        reach = np.float32(SCORE_MAX - SCORE_FLOOR)
        factor = reach / span if span > 0 else np.float32(0)
        level = np.float32(SCORE_FLOOR) + (logits - floor) * factor
    level = np.where(level < SCORE_MAX, level, np.float32(SCORE_MAX))
    return np.maximum(level, np.float32(0)).astype(np.int64)


def follow(rank_of: npt.NDArray[np.uint16], rows: npt.NDArray[Any], scores: Longs) -> None:
    """Moves the ranks of these distinct rows a quarter of the way to their scores."""
    before, aim = rank_of[rows].astype(np.int64), scores << 8
    rank_of[rows] = np.where(before == 0, aim, before + ((aim - before) >> SCORE_SHIFT))
