"""One decode rank: which requests wait and run, and how long each step takes. Reads no clock.

It is the engine's loop with simulated steps. Requests wait in order of arrival until the ledger
admits them in all accounts; from then on `ess.engine.scheduler` says which are prefilled and which
decode. Promises are for the whole length, so no request is preempted. With a time per token,
`ess.engine.tpot_control` decides depth, batch and chunk from earlier steps. A step takes as long as
if every request had the whole depth verified, though a request at its end verifies less.

Misses: a request whose rows fit into its share of the slots misses nothing, and leaves its spare
slots to the others; those that do not fit share the rest evenly, and each misses what `missed` says
for its length. That is where shared LRU settles; a request that has just arrived is assumed to be
warm.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ess.engine import scheduler, tpot_control
from ess.engine.chunking.sizes import PrefillTime
from ess.engine.requests.request import State
from ess.engine.requests.roster import Roster
from ess.engine.tpot_control import TPOT, Pace, SeenStep
from ess.errors import PoolFull
from ess.pool.capacity import Needs, needs
from ess.pool.ledger import Ledger, Reservation
from ess.sim.serving.arrivals import Arrival
from ess.sim.serving.lines import Lines, Span
from ess.sim.step_grid import StepClock

BATCH: Final = "batch"
LOOK_EVERY: Final = 16

Missed = Callable[[int, float], float]
"""Rows that a request of this length misses per layer and step with this many slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What a replay does not change. Without `slot_floor` every row has a slot: no offload.

    `chunk_time` is the prefill that runs beside decode; None if a tier does it. The prompts of a
    step have at most `positions_max` positions together.
    """

    make_ledger: Callable[[], Ledger]
    slot_count: int
    slot_floor: int | None
    window_floor: int = 0
    times: StepClock
    missed: Missed
    depth: int = 1
    target_ms: float | None = None
    batch_max: int = 512
    chunk_max: int = 512
    chunk_time: PrefillTime | None = None
    positions_max: float = math.inf

    def needs(self, arrival: Arrival) -> Needs:
        length = arrival.prompt_tokens + arrival.output_tokens
        slots = min(length, self.slot_floor or length)
        return needs(length, slots=slots, window_floor=self.window_floor)

    def start(self) -> Pace:
        return tpot_control.start(
            target_ms=self.target_ms,
            verified_max=self.depth,
            batch_max=self.batch_max,
            chunk_max=self.chunk_max,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Life:
    """A request under way. `right` holds, for each of its steps, how many drafts are right;
    `cached` prompt tokens need no prefill. `draft_count` drafts wait for each of its steps. A step
    is learned before the next is planned, so `ahead_count` stays 0."""

    number: int
    arrival: Arrival
    right: bytes
    draft_count: int = 0
    ahead_count: int = 0
    cached: int = 0
    state: State = "waiting"
    length: int = 0
    prefilled_count: int = 0
    made: int = 0
    step_count: int = 0
    first_s: float | None = None
    end_s: float | None = None
    refused: str | None = None
    reservation: Reservation | None = field(default=None, repr=False)

    @property
    def rank(self) -> tuple[int, int]:
        return 0, self.number

    @property
    def left_count(self) -> int:
        return self.arrival.output_tokens - self.made

    @property
    def prefill_count(self) -> int:
        return self.arrival.prompt_tokens - 1


@dataclass(frozen=True, slots=True)
class Flight:
    """A step under way: each request of its batch with the tokens it has verified, prompt chunks
    from their first position to their end, and the time."""

    turns: list[tuple[Life, int]]
    depth: int
    decode_s: float
    exposed_s: float
    chunks: list[tuple[Life, int, int]]
    chunk_s: float

    @property
    def chunk_tokens(self) -> int:
        return sum(stop - start for _, start, stop in self.chunks)

    @property
    def seconds(self) -> float:
        return self.decode_s + self.chunk_s


@dataclass(slots=True)
class Running:
    """The state of a rank, and sums over its steps, weighted by their seconds."""

    rank: Rank
    ledger: Ledger = field(init=False)
    pace: Pace = field(init=False)
    waiting: deque[Life] = field(default_factory=deque)
    roster: Roster[Life] = field(default_factory=Roster)
    limiter: str | None = None
    batch_peak: int = 0
    busy_s: float = 0.0
    exposed_s: float = 0.0
    batch_s: float = 0.0
    missed_s: float = 0.0
    waited_s: dict[str, float] = field(default_factory=dict)
    lines: Lines = field(default_factory=Lines)
    _missed: float = 0.0
    _looked: tuple[int, int] = (-1, -1)
    _change_count: int = 0
    _step_count: int = 0

    def __post_init__(self) -> None:
        self.ledger = self.rank.make_ledger()
        self.pace = self.rank.start()

    @property
    def running_count(self) -> int:
        return self.roster.count("decoding") + self.roster.count("prefilling")

    def require(self, life: Life) -> None:
        """Raises PoolFull if not even an empty rank could take it."""
        self.ledger.require(self.rank.needs(life.arrival))

    def launch(self, now_s: float) -> Flight | None:
        """Admits the requests that fit, then launches a step; None when no request runs."""
        self._admit()
        depth = self.pace.verified_count
        turns = scheduler.plan_batch(
            self.roster,
            batch_max=self.rank.batch_max,
            query_max=self.rank.batch_max * self.rank.depth,
            verified_max=depth,
        )
        decode_s, exposed_s = self._decode_s([life.length for life, _ in turns], depth)
        chunks = scheduler.plan_chunks(self.roster, self.pace.chunk_limit, self.rank.positions_max)
        if not turns and not chunks:
            return None
        flight = Flight(turns, depth, decode_s, exposed_s, chunks, self._chunk_s(chunks))
        self._count(flight, now_s)
        return flight

    def land(self, flight: Flight, now_s: float) -> list[Life]:
        """Adds the tokens of the step; returns the requests that ended."""
        for life, verified_count in flight.turns:
            _advance(life, verified_count, now_s)
        self._observe(flight)
        done = [life for life, _ in flight.turns if life.end_s is not None]
        for life in done:
            self._leave(life)
        for life, _, stop in flight.chunks:
            self._prefilled(life, stop)
        return done

    def _admit(self) -> None:
        self.limiter = None
        while self.waiting:
            life = self.waiting[0]
            try:
                self._refuse_if_crowded()
                life.reservation = self.ledger.reserve(self.rank.needs(life.arrival))
            except PoolFull as short:
                self.limiter = short.limiter
                return
            self.waiting.popleft()
            self._enter(life)

    def _refuse_if_crowded(self) -> None:
        limit = self.pace.batch_limit
        if self.running_count >= limit:
            paced = self.rank.target_ms is not None and limit < self.rank.batch_max
            raise PoolFull(
                limiter=TPOT if paced else BATCH,
                needed=1,
                free=0,
                sentence=f"{limit} requests run at once",
            )

    def _enter(self, life: Life) -> None:
        life.length = life.arrival.prompt_tokens
        life.prefilled_count = life.cached
        self.roster.add(life)
        self.roster.move(life, "prefilling")
        if self.rank.chunk_time is None or life.prefilled_count == life.prefill_count:
            self._decode(life)

    def _decode(self, life: Life) -> None:
        self.roster.move(life, "decoding")
        self._change_count += 1

    def _leave(self, life: Life) -> None:
        assert life.reservation is not None, f"request {life.number} runs without a reservation"
        self.ledger.release(life.reservation)
        self.roster.move(life, "finished")
        self._change_count += 1

    def _chunk_s(self, chunks: Sequence[tuple[Life, int, int]]) -> float:
        """Tokens attend only within their own prompt, so the times of packed chunks add up."""
        time = self.rank.chunk_time
        assert time is not None or not chunks, "a tier prefills, and the rank does too"
        return sum(time.of(stop - start, after=start) for _, start, stop in chunks) if time else 0.0

    def _prefilled(self, life: Life, stop: int) -> None:
        life.prefilled_count = stop
        if life.prefilled_count == life.prefill_count:
            self._decode(life)

    def _decode_s(self, lengths: Sequence[int], depth: int) -> tuple[float, float]:
        if not lengths:
            return 0.0, 0.0
        time = self.rank.times.at(
            requests=len(lengths),
            queries=depth,
            context=sum(lengths) / len(lengths),
            misses=self._misses(lengths),
        )
        return time.step_us / 1e6, time.exposed_us / 1e6

    def _misses(self, lengths: Sequence[int]) -> float:
        """Lengths grow by a token or two a step, so this is computed anew only now and then, and
        when a request joins or leaves."""
        looked = (self._change_count, self._step_count // LOOK_EVERY)
        if self._looked != looked:
            self._looked = looked
            self._missed = mean_misses(lengths, self.rank.slot_count, self.rank.missed)
        return self._missed

    def _observe(self, flight: Flight) -> None:
        """Tells the control about a step, if a time per token is set."""
        self._step_count += 1
        if self.rank.target_ms is None:
            return
        verified = [(flight.depth - 1, life.right[life.step_count - 1]) for life, _ in flight.turns]
        seen = SeenStep(
            seconds=flight.decode_s,
            request_count=len(flight.turns),
            query_count=len(flight.turns) * flight.depth,
            draft_count=tpot_control.drafts_of(flight.depth, self.rank.depth),
            verified=[(count, min(count, right)) for count, right in verified],
            chunk_tokens=flight.chunk_tokens,
            chunk_seconds=flight.chunk_s,
        )
        self.pace = tpot_control.advance(self.pace, seen)

    def _count(self, flight: Flight, now_s: float) -> None:
        self.batch_peak = max(self.batch_peak, len(flight.turns))
        self.busy_s += flight.seconds
        self.exposed_s += flight.exposed_s
        self.batch_s += flight.seconds * len(flight.turns)
        self.missed_s += flight.decode_s * self._missed if flight.turns else 0.0
        self.lines.add(
            Span(
                now_s,
                flight.seconds,
                len(flight.turns),
                len(self.waiting),
                self._missed if flight.turns else 0.0,
                flight.exposed_s / flight.seconds,
            )
        )
        if self.limiter is not None:
            self.waited_s[self.limiter] = self.waited_s.get(self.limiter, 0.0) + flight.seconds


def _advance(life: Life, verified_count: int, now_s: float) -> None:
    token_count = min(1 + life.right[life.step_count], verified_count)
    life.step_count += 1
    life.made += token_count
    life.length += token_count
    if life.first_s is None:
        life.first_s = now_s
    if life.left_count == 0:
        life.end_s = now_s


def mean_misses(lengths: Sequence[int], slot_count: int, missed: Missed) -> float:
    """Misses per request when the slots are shared as described above.

    >>> mean_misses([10, 100], 50, lambda length, slots: length - slots)
    30.0
    """
    if sum(lengths) <= slot_count:
        return 0.0
    left, count = slot_count, len(lengths)
    ordered = sorted(lengths)
    while ordered[-count] * count <= left:
        left -= ordered[-count]
        count -= 1
    share = left / count
    return sum(missed(length, share) for length in ordered[-count:]) / len(lengths)
