"""Synthetic selections of one indexer layer, calibrated to the published miss curves.

A layer keeps a hot set of positions. Each member has a score that is the sum of a slow and a fast
autoregressive part; a query picks the best of the hot set, and a few cold positions from anywhere.
After each query a few members drift: others take their place. Slow scores make the working set,
fast ones the churn at its edge, cold picks the misses that no working set prevents, and drift the
slow ageing of resident rows.

Layers may be kin: a share of their members, and the slow scores of these, then come from one
process that all layers of a seed share, so a position that is hot in one is likely hot in the next.
Without kinship layers are independent.

Each layer is drawn on its own, from (seed, layer), so a stream holds one layer in memory and the
order in which layers are drawn changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

COLD_SCORE: Final = -4.0
HOT_DEFAULT: Final = 6750


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """How one layer selects. `hot_share` of the context, if given, replaces `hot`.

    `slow_weight` is the deviation of the slow part of a score whose variance is 1.
    """

    hot: int = HOT_DEFAULT
    hot_share: float | None = None
    cold: int = 57
    drift: float = 9.0
    fast_memory: float = 0.24
    slow_memory: float = 0.99
    slow_weight: float = 0.78

    def __post_init__(self) -> None:
        if self.hot < 1 or self.cold < 0 or self.drift < 0:
            raise BadInput(f"{self}: hot must be positive, cold and drift not negative")
        if self.hot_share is not None and not 0 < self.hot_share <= 1:
            raise BadInput(f"hot_share {self.hot_share} must lie in (0, 1]")
        for name in ("fast_memory", "slow_memory", "slow_weight"):
            if not 0 <= getattr(self, name) < 1:
                raise BadInput(f"{name} {getattr(self, name)} must lie in [0, 1)")

    def hot_count(self, context: int) -> int:
        wanted = self.hot if self.hot_share is None else round(self.hot_share * context)
        return min(wanted, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLoad:
    """One request: its context before the first step, and the form of each step.

    A step verifies `query_count` tokens and accepts all of them, so the context grows by that many.
    `recent` positions before each query are always selected. `kinship` is the share of hot members
    that layers have in common.
    """

    context: int
    step_count: int
    query_count: int = 1
    top_k: int = 2048
    recent: int = 0
    kinship: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.context < 1 or self.step_count < 1 or self.query_count < 1 or self.top_k < 1:
            raise BadInput(f"{self}: context, steps, queries and top-k must all be positive")
        if not 0 <= self.recent <= self.top_k:
            raise BadInput(f"recent {self.recent} must lie in [0, top_k {self.top_k}]")
        if not 0 <= self.kinship <= 1:
            raise BadInput(f"kinship {self.kinship} must lie in [0, 1]")

    @property
    def context_end(self) -> int:
        return self.context + self.step_count * self.query_count


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnStep:
    """One step of one layer: what each query picked, ascending, and a score for every position.

    Cold picks get the least score that was picked, all other cold positions `COLD_SCORE`.
    """

    length: int
    selection: Ints
    scores: Floats


class _Walk:
    """A permutation whose first `hot` places are the members, and the members' slow scores.

    A drifting member changes places with a position that is no member, so members stay distinct.
    """

    def __init__(
        self, rng: np.random.Generator, *, hot: int, order: Ints, loose: Ints, memory: float
    ) -> None:
        self._rng, self._loose, self.hot, self.order = rng, loose, hot, order
        self._memory, self._fresh = np.float32(memory), np.float32(np.sqrt(1 - memory**2))
        self.slow = rng.standard_normal(hot, dtype=np.float32)

    def advance(self, drift: float) -> None:
        noise = self._rng.standard_normal(self.hot, dtype=np.float32)
        self.slow = self._memory * self.slow + self._fresh * noise
        outside = self.order.size - self.hot
        wanted = min(int(self._rng.poisson(drift)), self._loose.size, outside)
        leaving = self._rng.choice(self._loose, wanted, replace=False, shuffle=False)
        joining = self.hot + self._rng.choice(outside, wanted, replace=False, shuffle=False)
        self.order[leaving], self.order[joining] = self.order[joining], self.order[leaving]


class _Query(NamedTuple):
    """What one query picked, the members with their scores, and the least score that was picked."""

    selection: Ints
    members: Ints
    scores: Floats
    threshold: float


class LayerStream:
    """The selections of one layer, step by step; windows, if any, are drawn first."""

    def __init__(self, load: RequestLoad, profile: LayerProfile, *, layer: int) -> None:
        self._load, self._profile = load, profile
        self._rng = np.random.default_rng([load.seed, 1, layer])
        hot = profile.hot_count(load.context)
        self._common = _common_walk(load) if load.kinship > 0 else None
        shared = 0 if self._common is None else min(hot, self._common.hot)
        self._kin = np.flatnonzero(self._rng.random(shared) < load.kinship).astype(np.int32)
        self._own = _Walk(
            self._rng,
            hot=hot,
            order=_order_with(self._kin, size=load.context, rng=self._rng),
            loose=np.setdiff1d(np.arange(hot, dtype=np.int32), self._kin),
            memory=profile.slow_memory,
        )
        self._fast = self._rng.standard_normal(hot, dtype=np.float32)
        self._length = load.context

    def windows(self, count: int) -> Ints:
        """What the last `count` queries of a prefill pick, oldest first."""
        picks = [self._query().selection for _ in range(count)]
        return np.stack(picks) if picks else np.empty((0, self._load.top_k), np.int32)

    def __iter__(self) -> Iterator[DrawnStep]:
        return (self.step() for _ in range(self._load.step_count))

    def step(self) -> DrawnStep:
        start, picks = self._length, []
        scores = np.full(self._load.context_end, COLD_SCORE, np.float32)
        for _ in range(self._load.query_count):
            self._length += 1
            query = self._query()
            picks.append(query.selection)
            scores[query.members] = np.maximum(scores[query.members], query.scores)
            scores[query.selection] = np.maximum(scores[query.selection], query.threshold)
        return DrawnStep(length=start, selection=np.stack(picks), scores=scores)

    def _query(self) -> _Query:
        profile, load = self._profile, self._load
        scores = self._advance()
        places = self._own.order[: scores.size]
        if self._common is not None:
            places = self._common.order[places]
        wanted = max(0, min(load.top_k - profile.cold - load.recent, scores.size))
        split = scores.size - wanted
        top = np.argpartition(scores, min(split, scores.size - 1))[split:]
        return _Query(
            selection=self._with_cold(places[top]),
            members=places,
            scores=scores,
            threshold=float(scores[top].min(initial=scores.max())),
        )

    def _advance(self) -> Floats:
        profile = self._profile
        self._own.advance(profile.drift)
        if self._common is not None:
            self._common.advance(LayerProfile().drift)
            self._own.slow[self._kin] = self._common.slow[self._kin]
        noise = self._rng.standard_normal(self._fast.size, dtype=np.float32)
        fresh = np.float32(np.sqrt(1 - profile.fast_memory**2))
        self._fast = np.float32(profile.fast_memory) * self._fast + fresh * noise
        weight, rest = profile.slow_weight, np.sqrt(1 - profile.slow_weight**2)
        mixed: Floats = np.float32(weight) * self._own.slow + np.float32(rest) * self._fast
        return mixed

    def _with_cold(self, picked: Ints) -> Ints:
        """The picks, the newest positions and cold ones up to k, ascending and distinct."""
        load, length = self._load, self._length
        if length <= load.top_k:
            return _padded(np.arange(length, dtype=np.int32), load.top_k)
        chosen = np.zeros(length, bool)
        chosen[picked] = True
        chosen[length - load.recent :] = True
        wanted = load.top_k - int(np.count_nonzero(chosen))
        while wanted > 0:
            drawn = self._rng.integers(0, length, wanted)
            chosen[drawn] = True
            wanted = load.top_k - int(np.count_nonzero(chosen))
        return np.flatnonzero(chosen).astype(np.int32)


def _common_walk(load: RequestLoad) -> _Walk:
    rng = np.random.default_rng([load.seed, 2])
    hot, profile = min(HOT_DEFAULT, load.context), LayerProfile()
    return _Walk(
        rng,
        hot=hot,
        order=rng.permutation(load.context).astype(np.int32),
        loose=np.arange(hot, dtype=np.int32),
        memory=profile.slow_memory,
    )


def _order_with(kin: Ints, *, size: int, rng: np.random.Generator) -> Ints:
    """A permutation that leaves the kin in their places and shuffles the rest."""
    order = np.arange(size, dtype=np.int32)
    loose = np.setdiff1d(order, kin)
    order[loose] = rng.permutation(loose)
    return order


def _padded(positions: Ints, top_k: int) -> Ints:
    padded = np.full(top_k, -1, np.int32)
    padded[: positions.size] = positions
    return padded
