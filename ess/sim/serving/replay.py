"""Requests through a prefill tier and a decode rank, by events; no clock is read anywhere.

There are three events: a request arrives, a prefilled one lands at the rank, a step ends. They are
handled in order of time, and at the same moment in the order in which they were foreseen; a step
begins after all events of its moment. So equal input gives an equal replay. A request that could
never be admitted is refused as it arrives, and so is one that finds `waiting_max` others waiting;
`refused` then names what is short.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from ess.errors import BadInput, PoolFull
from ess.sim.prefill.prefill_time import Tier
from ess.sim.serving.arrivals import Arrival
from ess.sim.serving.decode_rank import Flight, Life, Rank, Running
from ess.sim.serving.traffic import right_drafts

WAITING_MAX: Final = 256
PREFILL: Final = "prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Which drafts are right: the chance of each in turn, from a seed."""

    chance: float = 0.7
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The result: all requests, the rank at its end, and the time of the end."""

    lives: tuple[Life, ...]
    rank: Running
    seconds: float


class _Event(NamedTuple):
    at_s: float
    order: int
    what: Life | Flight


def replay(
    arrivals: Sequence[Arrival],
    rank: Rank,
    *,
    tier: Tier | None = None,
    drafting: Drafting = Drafting(),
    waiting_max: int = WAITING_MAX,
    cached: Sequence[int] = (),
) -> Replay:
    """`arrivals` in order of time, with `cached` tokens of each prompt, by default none. Prefill
    runs on the tier, or beside decode if there is none."""
    if not arrivals:
        raise BadInput("a replay of no requests has nothing to report")
    if (tier is None) == (rank.chunk_time is None):
        raise BadInput(
            "give a prefill tier or the time of prefill beside decode, exactly one of them"
        )
    lives = tuple(
        Life(
            number=number,
            arrival=arrival,
            right=_right(arrival, number, rank.depth, drafting),
            draft_count=rank.depth - 1,
            cached=cached_count,
        )
        for number, (arrival, cached_count) in enumerate(
            zip(arrivals, cached or [0] * len(arrivals), strict=True)
        )
    )
    events = _Events(Running(rank), tier, waiting_max)
    for life in lives:
        events.foresee(life.arrival.at_s, life)
    seconds = events.run()
    return Replay(lives=lives, rank=events.rank, seconds=seconds)


def _right(arrival: Arrival, number: int, depth: int, drafting: Drafting) -> bytes:
    return right_drafts(
        seed=drafting.seed,
        number=number,
        chance=drafting.chance,
        steps=arrival.output_tokens,
        depth=depth,
    )


@dataclass(slots=True)
class _Events:
    rank: Running
    tier: Tier | None
    waiting_max: int
    now_s: float = 0.0
    _queue: list[_Event] = field(default_factory=list)
    _foreseen_count: int = 0
    _free_s: list[float] = field(default_factory=list)
    _landing: set[int] = field(default_factory=set)
    _is_busy: bool = False

    def foresee(self, at_s: float, what: Life | Flight) -> None:
        assert at_s >= self.now_s, f"{what} was foreseen for the past"
        heapq.heappush(self._queue, _Event(at_s, self._foreseen_count, what))
        self._foreseen_count += 1

    def run(self) -> float:
        """Runs until no request waits, runs or arrives; returns the time."""
        if self.tier is not None:
            self._free_s = [0.0] * self.tier.pipelines
        while self._queue:
            event = heapq.heappop(self._queue)
            self.now_s = event.at_s
            self._happen(event.what)
            is_last_now = not self._queue or self._queue[0].at_s > self.now_s
            if is_last_now and not self._is_busy:
                self._launch()
        assert self.rank.running_count == len(self.rank.waiting) == 0, "a request was left behind"
        return self.now_s

    def _happen(self, what: Life | Flight) -> None:
        if isinstance(what, Flight):
            self._is_busy = False
            self.rank.land(what, self.now_s)
        elif what.number in self._landing:
            self._landing.remove(what.number)
            self.rank.waiting.append(what)
        else:
            self._arrive(what)

    def _arrive(self, life: Life) -> None:
        try:
            self.rank.require(life)
        except PoolFull as never:
            life.refused = never.limiter
            return
        if len(self.rank.waiting) + self._queued_count() >= self.waiting_max:
            life.refused = self.rank.limiter or PREFILL
        elif self.tier is None:
            self.rank.waiting.append(life)
        else:
            self._prefill(self.tier, life)

    def _prefill(self, tier: Tier, life: Life) -> None:
        """Prefills on the pipeline that is free first."""
        busy_s, ready_s = tier.seconds(life.arrival.prompt_tokens, cached=life.cached)
        begun_s = max(self.now_s, heapq.heappop(self._free_s))
        heapq.heappush(self._free_s, begun_s + busy_s)
        self._landing.add(life.number)
        self.foresee(begun_s + ready_s, life)

    def _queued_count(self) -> int:
        """Requests on the tier that no pipeline works on yet."""
        return max(0, len(self._landing) - len(self._free_s))

    def _launch(self) -> None:
        flight = self.rank.launch(self.now_s)
        if flight is not None:
            self._is_busy = True
            self.foresee(self.now_s + flight.seconds, flight)
