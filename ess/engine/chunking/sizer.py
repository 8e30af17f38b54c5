"""The chunk sizes of a running pipeline: fitted at the start, and again while it runs.

At the start the first stage is timed on prompts of some lengths, and a quadratic is fitted to them.
Later every chunk that has run is an observation: c tokens behind h others take

    quadratic c (c + 2 h) + linear c + a constant.

Sizes depend only on the ratio of the first two terms, so it does not matter that the profile times
one stage and an observation the slowest of all. A constant cancels out of the sizes.

What runs must not be disturbed by a few slow chunks, nor may sizes swing to and fro:

    kinds     observations are kept by kind, which is about how long a chunk was and how deep; of
              a kind its middle one counts. So a stall is outvoted by other chunks of its kind, and
              a workload of mostly one kind does not push the other kinds out.
    far ones  a kind more than 4 times as slow or fast as most are, against what was expected of
              each, is left out; the rest are weighted so that one kind cannot turn the fit.
    patience  another fit is taken only when it changes a size by an eighth of the first chunk, when
              its quadratic term stands clear of its own error, and when three fits in a row, each
              with 16 more observations, have moved sizes to the same side.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from ess.engine.chunking.fit import TimeFit, fitted, fitted_robustly
from ess.engine.chunking.sizes import SMOOTHING_DEFAULT, Chunking, PrefillTime, wanted_chunk
from ess.errors import BadInput
from ess.units import PAGE_ROWS

PROFILE_COUNT: Final = 32
PROFILE_MARGIN: Final = (5, 4)
SAMPLES_MIN: Final = 8
KINDS_MAX: Final = 64
KEPT_EACH: Final = 7
WINDOW: Final = 1024
EVERY: Final = 16
IN_A_ROW: Final = 3
CHANGE: Final = 8  # a size must change by this part of the first chunk
CLEAR: Final = 4.0  # standard errors


class Observed(NamedTuple):
    done: int
    tokens: int
    seconds: float
    number: int = 0


class ChunkSizer:
    """Sizes of chunks from `first` tokens on. `time` is the fit that they follow, None while they
    are all of one size; `why` says where it comes from, or why there is none."""

    def __init__(
        self,
        first: int,
        *,
        context: int,
        dynamic: bool,
        smoothing: float = SMOOTHING_DEFAULT,
        page: int = PAGE_ROWS,
    ) -> None:
        self._chunking = Chunking(first=first, context=context, page=page, smoothing=smoothing)
        self._strict = replace(self._chunking, smoothing=1.0)
        self._is_dynamic = dynamic
        self.time: PrefillTime | None = None
        self.why = "not timed yet" if dynamic else "dynamic chunks are off"
        self._kinds: OrderedDict[tuple[int, int], deque[Observed]] = OrderedDict()
        self._seen_count = 0
        self._side_before = self._in_a_row = 0

    def next(self, done: int, left: int) -> int:
        """Tokens of the chunk behind `done` tokens of a prompt that has `left` more."""
        chunking = self._chunking
        if done < 0 or left < 1 or done + left > chunking.context:
            raise BadInput(
                f"{done} tokens are done and {left} left of a context of {chunking.context}"
            )
        if self.time is None:
            return min(chunking.first, left)
        return min(wanted_chunk(self.time, chunking, done=done), left)

    # ---- the profile

    def profile_sizes(self) -> Sequence[int]:
        """Lengths of the prompts to time, longest first: the first warms up. None for chunks of
        one size."""
        if not self._is_dynamic:
            return ()
        more, of = PROFILE_MARGIN
        longest = min(self._chunking.first * more // of, self._chunking.context)
        step = max(1, longest // PROFILE_COUNT)
        return tuple(range(longest, 0, -step))[:PROFILE_COUNT]

    def profiled(self, samples: Iterable[tuple[int, float]]) -> None:
        """(tokens, seconds) in the order of `profile_sizes`; the first warmed up and is dropped."""
        kept = [Observed(0, *sample) for sample in samples][1:]
        kept = [each for each in kept if _is_time(each.seconds)]
        if not self._is_dynamic:
            return
        self.time = None
        if len(kept) < SAMPLES_MIN:
            self.why = f"{len(kept)} prompts were timed, a fit needs {SAMPLES_MIN}"
            return
        fit = fitted([(each.done, each.tokens, each.seconds) for each in kept])
        if fit is None or fit.quadratic <= 0:
            self.why = "the time of a prompt does not grow faster than its length"
            return
        self._take(fit, f"{len(kept)} prompts of up to {max(each.tokens for each in kept)} tokens")

    # ---- while it runs

    def observe(self, done: int, count: int, seconds: float) -> None:
        """A chunk of `count` tokens behind `done` has taken `seconds` in its slowest stage."""
        if not self._is_dynamic or not _is_time(seconds) or count < 1 or done < 0:
            return
        self._seen_count += 1
        self._keep(Observed(done, count, seconds, self._seen_count))
        if self._seen_count % EVERY == 0:
            self._fit_again()

    def _keep(self, seen: Observed) -> None:
        unit, first = self._chunking.unit, self._chunking.first
        kind = (_half_octave(seen.done // unit), CHANGE * seen.tokens // first)
        self._kinds.setdefault(kind, deque(maxlen=KEPT_EACH)).append(seen)
        self._kinds.move_to_end(kind)
        oldest = next(iter(self._kinds.values()))
        if len(self._kinds) > KINDS_MAX or oldest[-1].number <= self._seen_count - WINDOW:
            self._kinds.popitem(last=False)

    def _fit_again(self) -> None:
        middles = [self._middle(kept) for kept in self._kinds.values()]
        if len(middles) < SAMPLES_MIN:
            return
        expected = [self._expected(done, count) for done, count, _ in middles]
        fit = fitted_robustly(middles, expected)
        if fit is None or not fit.quadratic > CLEAR * fit.quadratic_error:
            self._side_before = 0
            return
        side = self._side(fit.time())
        self._in_a_row = self._in_a_row + 1 if side == self._side_before else 1
        self._side_before = side
        if side and self._in_a_row >= IN_A_ROW:
            self._take(fit, f"{len(middles)} kinds of chunks that ran")

    def _middle(self, kept: Sequence[Observed]) -> tuple[int, int, float]:
        ordered = sorted(kept, key=lambda each: each.seconds / self._expected(*each[:2]))
        return ordered[(len(ordered) - 1) // 2][:3]

    def _expected(self, done: int, count: int) -> float:
        """The expected time of a kind relative to other kinds, in no particular unit."""
        return float(count) if self.time is None else self.time.of(count, after=done)

    def _side(self, time: PrefillTime) -> int:
        """1 or -1 where these sizes would be clearly longer or shorter than now, else 0."""
        first, done = self._chunking.first, self._chunking.first
        while done < self._chunking.context:
            now = first if self.time is None else wanted_chunk(self.time, self._strict, done=done)
            change = wanted_chunk(time, self._strict, done=done) - now
            if abs(change) * CHANGE > first:
                return 1 if change > 0 else -1
            done *= 2
        return 0

    def _take(self, fit: TimeFit, source: str) -> None:
        self.time, self._side_before = fit.time(), 0
        per_pair, per_token = 1e9 * self.time.quadratic, 1e6 * self.time.linear
        self.why = f"{per_token:.3g} us a token, {per_pair:.3g} ns a token squared: from {source}"


def _half_octave(pages: int) -> int:
    """0, 1, 2, 3, then two to each doubling."""
    return pages if pages < 2 else 2 * pages.bit_length() + (pages >> (pages.bit_length() - 2) & 1)


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and 1e-9 < seconds < 1e9
