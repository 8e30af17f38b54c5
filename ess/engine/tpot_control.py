"""How deep to draft, how many requests to admit, how long a chunk may be: for a time per token.

Every launched step is one observation: its seconds, its queries, its draft passes. A step takes

    T = fixed + query_s * queries + draft_s * drafts

fitted to these observations by least squares, in which old steps fade. A draft is accepted with a
chance that depends on its place; with n tokens verified a step makes

    made(n) = 1 + p1 + p1 p2 + ... up to n - 1 factors

tokens per request, and its time per token is T / made(n). Steps of one depth show neither the time
nor the chances of another depth, so now and then two steps run at the next lower or higher depth.
Until the fit has seen such steps it leans, lightly, on a guess: half of the first step's time is
fixed, half goes by the query (`prior`).

For a given batch the depth of the least time per token is also the depth of the most tokens per
second, so the target plays no part in choosing it; the depth changes only for a gain of 3 %. The
target bounds the batch: as many requests as some depth can serve within it. Drafts are luck, so
where there are any a part of the target, `SPARE`, is left: with it nine in ten requests keep the
target and not only half of them. A running request is never stopped for the target, so a batch
above the bound shrinks only as requests end.

The bound needs the split into fixed time and time per query, which batches of one size do not show:
a guess that two requests are too many would never be corrected, since two would never run. So while
only one size of batch was seen, a second request enters if one request alone is within the target.
If that was wrong, these two requests are late until one of them ends. It happens once: from then on
the fit leans on the last split that batches of different sizes have shown, and no more on the first
step's halves. Upward the fit is trusted as far as twice the widest batch so far: every doubling is
seen before the next one, also when misses make steps longer than any straight line.

Drafts never change a request's tokens: whatever is decided here can cost speed, never correctness.
All of it is pure: state and observation in, state out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput
from ess.units import PAGE_ROWS

Floats = npt.NDArray[np.float64]

TPOT: Final = "time per token"
"""Names what a request waits for when one more would make every step too slow."""

FADE: Final = 0.98
LEAN: Final = 0.01
WEIGHT: Final = 1 / 32
TRIES_MAX: Final = 2
TRY_EVERY: Final = 32
TRY_STEPS: Final = 2
WIN: Final = 0.03
CHANCE_START: Final = 0.7
SPREAD_MIN: Final = 8.0
SPARE: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenStep:
    """One step: decode seconds, requests, queries, draft passes; for each request how many drafts
    were verified and how many of these were right; a chunk's tokens and seconds."""

    seconds: float = 0.0
    request_count: int = 0
    query_count: int = 0
    draft_count: int = 0
    verified: Sequence[tuple[int, int]] = ()
    chunk_tokens: int = 0
    chunk_seconds: float = 0.0


class Limits(NamedTuple):
    """The most that the next step has: requests, tokens to verify of each, tokens of prompts."""

    batch: int
    verified: int
    chunk: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pace:
    """Fitted times, chances by place of the draft, and the decisions that follow from them.

    `moments` are sums of products of 1, queries, draft passes and requests of the steps seen.
    `times` are seconds: fixed, per query, per draft pass. `prior` are the times that the fit leans
    on; with `knows_sizes` batches of different sizes have shown them, else they are a guess.
    `widest` is the largest batch so far.
    """

    target_s: float | None
    verified_max: int
    batch_max: int
    chunk_max: int
    moments: Floats
    products: Floats
    prior: Floats
    chances: tuple[float, ...]
    times: tuple[float, float, float] = (0.0, 0.0, 0.0)
    chunk_token_s: float = 0.0
    depth: int = 1
    request_count: int = 1
    step_count: int = 0
    widest: int = 0
    knows_sizes: bool = False

    @property
    def verified_count(self) -> int:
        """The tokens to verify in the next step: the depth, or the next depth above or below, to
        learn from it."""
        if self.verified_max == 1 or self.step_count % TRY_EVERY < TRY_EVERY - TRY_STEPS:
            return self.depth
        goes_up = self.step_count // TRY_EVERY % 2 == 1 or self.depth == 1
        return self.depth + 1 if goes_up and self.depth < self.verified_max else self.depth - 1

    @property
    def batch_limit(self) -> int:
        """The most requests that some depth keeps within the target; 1 if no step was seen, 2 if
        one request is within the target and no other size of batch was seen."""
        if self.target_s is None:
            return self.batch_max
        within = max(map(self._most, range(1, self.verified_max + 1))) if self.widest else 0
        if within == 1 and not self.knows_sizes:
            within = 2
        return max(1, min(within, 2 * self.widest, self.batch_max))

    @property
    def chunk_limit(self) -> int:
        """The prompt tokens that fit into what the decode batch leaves of the target: whole pages,
        at least one."""
        if self.target_s is None or self.chunk_token_s == 0.0:
            return self.chunk_max
        spare_s = self.target_s * self.made(self.depth) - self.step_s(
            self.depth, self.request_count
        )
        tokens = max(0, int(spare_s / self.chunk_token_s)) // PAGE_ROWS * PAGE_ROWS
        return min(self.chunk_max, max(PAGE_ROWS, tokens))

    @property
    def limits(self) -> Limits:
        return Limits(self.batch_limit, self.verified_count, self.chunk_limit)

    def made(self, depth: int) -> float:
        """Tokens that a request makes in a step of this depth, on average."""
        assert 1 <= depth <= self.verified_max, f"depth {depth} of {self.verified_max}"
        return 1.0 + sum(math.prod(self.chances[:place]) for place in range(1, depth))

    def step_s(self, depth: int, request_count: int) -> float:
        assert request_count > 0, "a step without requests"
        fixed, query, draft = self.times
        return fixed + query * depth * request_count + draft * drafts_of(depth, self.verified_max)

    def _most(self, depth: int) -> int:
        assert self.target_s is not None
        fixed, query, draft = self.times
        kept = 1.0 if self.verified_max == 1 else 1.0 - SPARE
        spare = kept * self.target_s * self.made(depth) - fixed
        spare -= draft * drafts_of(depth, self.verified_max)
        return int(min(self.batch_max, spare / max(query * depth, 1e-12)))


def drafts_of(depth: int, verified_max: int) -> int:
    """Draft passes of a step: at least one, or the MTP module's rows would have a gap."""
    assert 1 <= depth <= verified_max, f"depth {depth} of {verified_max}"
    return 0 if verified_max == 1 else max(1, depth - 1)


def start(*, target_ms: float | None, verified_max: int, batch_max: int, chunk_max: int) -> Pace:
    if target_ms is not None and not (target_ms > 0 and math.isfinite(target_ms)):
        raise BadInput(f"tpot_ms is {target_ms}, must be above 0")
    assert verified_max >= 1, verified_max
    return Pace(
        target_s=None if target_ms is None else target_ms / 1e3,
        verified_max=verified_max,
        batch_max=batch_max,
        chunk_max=chunk_max,
        moments=np.zeros((4, 4)),
        products=np.zeros(3),
        prior=np.zeros(3),
        chances=(CHANCE_START,) * (verified_max - 1),
        depth=verified_max,
    )


def advance(pace: Pace, seen: SeenStep) -> Pace:
    """The pace after one more step: the fit and the chances follow it, and the depth changes if
    another depth is better."""
    if seen.chunk_tokens:
        per_token = seen.chunk_seconds / seen.chunk_tokens
        known = pace.chunk_token_s or per_token
        pace = replace(pace, chunk_token_s=known + WEIGHT * (per_token - known))
    if seen.request_count == 0:
        return pace
    assert seen.query_count >= seen.request_count, f"{seen.query_count} queries"
    features = np.array([1.0, seen.query_count, seen.draft_count, seen.request_count])
    prior = pace.prior
    if not prior.any():
        prior = np.array([seen.seconds / 2, seen.seconds / 2 / seen.query_count, 0.0])
    moments = FADE * pace.moments + np.outer(features, features)
    products = FADE * pace.products + features[:3] * seen.seconds
    times = _solve(moments[:3, :3], products, prior)
    tells_sizes = _spread(moments) >= SPREAD_MIN
    pace = replace(
        pace,
        moments=moments,
        products=products,
        prior=np.array(times) if tells_sizes else prior,
        times=times,
        chances=_follow(pace.chances, seen.verified),
        request_count=seen.request_count,
        step_count=pace.step_count + 1,
        widest=max(pace.widest, seen.request_count),
        knows_sizes=pace.knows_sizes or tells_sizes,
    )
    return replace(pace, depth=_depth(pace, seen.request_count))


def _solve(moments: Floats, products: Floats, prior: Floats) -> tuple[float, float, float]:
    """The fitted times, negative ones as 0: a time that falls with the load is noise."""
    lean = LEAN * np.eye(3)
    solved = np.linalg.solve(moments + lean, products + lean @ prior)
    fixed, query, draft = np.maximum(solved, 0.0).tolist()
    return fixed, query, draft


def _spread(moments: Floats) -> float:
    """The batch sizes of the steps seen: their squared distances from their mean, summed."""
    weight, requests, squares = moments[0, 0], moments[0, 3], moments[3, 3]
    assert weight > 0, "no step was seen"
    return float(squares - requests * requests / weight)


def _follow(chances: tuple[float, ...], verified: Sequence[tuple[int, int]]) -> tuple[float, ...]:
    """The chances after a step. A step tells of a draft's place only if all drafts before it were
    right. A step counts no more in a large batch than in one of `TRIES_MAX`: were all its drafts to
    count, the chances would follow the luck of the last few steps, and since a request that was let
    in stays, lucky steps would fill the batch beyond the target."""
    assert all(0 <= right <= count for count, right in verified), (
        f"more right than made: {verified}"
    )
    moved = list(chances)
    for place, chance in enumerate(chances):
        tries = [right > place for count, right in verified if count > place <= right]
        if tries:
            share = sum(tries) / len(tries)
            weight = 1 - (1 - WEIGHT) ** min(len(tries), TRIES_MAX)
            moved[place] = chance + weight * (share - chance)
    assert all(0.0 <= chance <= 1.0 for chance in moved), moved
    return tuple(moved)


def _depth(pace: Pace, request_count: int) -> int:
    """The depth of the least time per token; the present one while no other is 3 % better."""
    depths = range(1, pace.verified_max + 1)
    per_token = {n: pace.step_s(n, request_count) / pace.made(n) for n in depths}
    best = min(depths, key=lambda n: per_token[n])
    return best if per_token[best] < (1 - WIN) * per_token[pace.depth] else pace.depth
