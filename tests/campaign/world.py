"""A plan, played: turn by turn, every worker checked, every answer held against one engine's."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import zlib
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from ess.engine.engine import EngineConfig
from ess.engine.request import Request, Take
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput, BadState
from ess.transfer.runs import Region
from ess.transfer.transport import Transport
from ess.transfer.transports.faulty import Fault, FaultyTransport
from ess.transfer.transports.inprocess import Exchange
from tests.campaign.plan import TOKENS_MAX, TURNS, Ask, Hit, Plan
from tests.pd.rigs import Worker, alone
from tests.support.checkpoints import tokens
from tests.support.manual_clock import ManualClock
from tests.support.manual_lane import ManualLane

STEP_S = 0.01
LATE_STEP_S = 0.05
TURNS_MAX = 400
MEET_EVERY = 10
SCRATCH_BYTES = 1 << 18
LENGTHS = (1, 2, 30, 64, 65, 90, 128, 129, 150, 180, 190, 200)
TOO_LONG = 1100
VOCABULARY = 512


class Wrong(AssertionError):
    """What must never be: an answer that is not the reference's, a page that is not free again."""


@functools.cache
def prompts() -> list[list[int]]:
    """Every other one begins as the longest does."""
    longest = tokens(max(LENGTHS), VOCABULARY, seed=3)
    return [
        longest[:length] if number % 2 else tokens(length, VOCABULARY, seed=number)
        for number, length in enumerate(LENGTHS)
    ]


@functools.cache
def others() -> list[list[int]]:
    """Prompts of the same lengths."""
    return [tokens(length, VOCABULARY, seed=100 + length) for length in LENGTHS]


@functools.cache
def answers() -> list[list[int]]:
    """What one engine says that nothing happens to."""
    wish = Sampling(tokens_max=TOKENS_MAX, ignore_eos=True)
    return alone([(prompt, wish) for prompt in prompts()])


@dataclass(eq=False)
class Leg:
    """One request at one worker. `may_fail` says that it may be refused."""

    worker: Worker
    request: Request
    expected: list[int]
    may_fail: bool = False
    is_cancelled: bool = False
    is_over: bool = False


@dataclass
class Outcome:
    """`faults` by class, `ends` of legs by kind; a plan has the same `fingerprint` each time."""

    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    fingerprint: int = 0


class World:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.told = Outcome()
        self._draw = random.Random(plan.seed)
        self._clock, self._exchange = ManualClock(), Exchange()
        self._epochs = itertools.count(1)
        self._transports: list[FaultyTransport] = []
        self._givers = [self._made() for _ in range(plan.giver_count)]
        self._takers = [self._made() for _ in range(plan.taker_count)]
        self._frozen: dict[Worker, int] = {}
        self._legs: dict[str, list[Leg]] = {"give": [], "take": []}
        self._meet()

    # ---- workers

    def _made(self) -> Worker:
        plan, epoch = self.plan, next(self._epochs)
        config = EngineConfig(
            mtp=plan.mtp,
            depth=plan.depth,
            modes=plan.modes,
            promise=plan.promise,
            chunk_tokens=plan.chunk,
            handoff_failure=plan.failure,
        )
        pools = {
            "host_pages": plan.host_pages,
            "index_pages": plan.index_pages,
            "slot_pages": plan.slot_pages,
            "lines": plan.lines,
            "evict": plan.evict,
            "lane": ManualLane(seed=plan.seed + epoch, delay_max=plan.delay_max),
            "clock": self._clock,
        }
        return Worker(
            self._exchange,
            epoch,
            self._clock,
            config=config,
            pools=pools,
            lease_s=plan.lease_s,
            wait_s=plan.wait_s,
            wrap=lambda inner: self._worse(inner, epoch),
        )

    def _worse(self, inner: Transport, epoch: int) -> Transport:
        scratch = Region(99, np.zeros(SCRATCH_BYTES, np.uint8))
        inner.register([scratch])
        odds = {Fault(name): chance for name, chance in self.plan.odds.items()}
        made = FaultyTransport(
            inner, clock=self._clock, odds=odds, scratch=scratch, seed=self.plan.seed + epoch
        )
        self._transports.append(made)
        return made

    def _meet(self) -> None:
        for giver, taker in itertools.product(self._givers, self._takers):
            giver.port.meet(taker.port.metadata())
            taker.port.meet(giver.port.metadata())

    @property
    def _workers(self) -> list[Worker]:
        return [*self._givers, *self._takers]

    # ---- a turn

    def play(self) -> Outcome:
        for turn in range(TURNS_MAX):
            self._clock.advance(STEP_S if turn < TURNS else LATE_STEP_S)
            self._begin(turn)
            self._step(turn)
            self._look()
            if turn > TURNS and self._is_quiet():
                self.told.turns = turn
                self._settle()
                return self.told
        raise Wrong(f"it goes on behind turn {TURNS_MAX}: {self._open_legs()}")

    def _begin(self, turn: int) -> None:
        for number, ask in enumerate(self.plan.asks, 1):
            if turn == ask.give_at:
                self._give(number, ask)
            if turn == ask.take_at:
                self._take(number, ask)
        for hit in self.plan.hits:
            if turn == hit.at:
                self._strike(hit, turn)
        if turn % MEET_EVERY == 0:
            self._meet()

    def _step(self, turn: int) -> None:
        workers = self._workers
        self._draw.shuffle(workers)
        for worker in workers:
            if self._frozen.get(worker, 0) <= turn:
                worker.step()

    def _is_quiet(self) -> bool:
        return all(worker.is_quiet for worker in self._workers)

    # ---- requests

    def _give(self, number: int, ask: Ask) -> None:
        if ask.sort in ("alone", "never given", "too long"):
            return
        prompt = (others() if ask.sort == "foreign" else prompts())[ask.prompt]
        worker, wish = self._givers[ask.giver], Sampling(tokens_max=1)
        for turn in range(2 if ask.sort == "twice" else 1):
            request = worker.engine.add(prompt, wish, give=number)
            self._legs["give"].append(Leg(worker, request, [], may_fail=turn > 0))

    def _take(self, number: int, ask: Ask) -> None:
        if ask.sort == "never taken":
            return
        worker = self._takers[ask.taker]
        wish = Sampling(tokens_max=ask.tokens, ignore_eos=True)
        if ask.sort == "too long":
            self._refused(worker, wish)
            return
        take = None if ask.sort == "alone" else Take(number, self._givers[ask.giver].port.epoch)
        request = worker.engine.add(prompts()[ask.prompt], wish, take=take, priority=ask.priority)
        may_fail = take is not None and self.plan.failure == "refuse"
        expected = answers()[ask.prompt][: ask.tokens]
        self._legs["take"].append(Leg(worker, request, expected, may_fail=may_fail))

    def _refused(self, worker: Worker, wish: Sampling) -> None:
        try:
            worker.engine.add(tokens(TOO_LONG, VOCABULARY, seed=0), wish)
        except BadInput:
            self.told.ends["take: not let in"] += 1
        else:
            raise Wrong(f"a prompt of {TOO_LONG} tokens is let in")

    # ---- faults

    def _strike(self, hit: Hit, turn: int) -> None:
        self.told.faults[hit.strike] += 1
        match hit.strike.split():
            case ["cancel", side]:
                self._cancel(self._legs[side], hit.which)
            case ["restart", side]:
                self._restart(self._side(side), hit.which)
            case ["freeze", side]:
                workers = self._side(side)
                self._frozen[workers[hit.which % len(workers)]] = turn + hit.size
            case ["cut"]:
                self._cut(hit.which)
            case ["leap"]:
                self._clock.advance(0.3 * hit.size)
            case ["junk"]:
                self._meet_junk(hit)
            case ["forget"]:
                with contextlib.suppress(BadState):  # some of them are in use
                    self._any(hit).offload.forget_prefixes()
            case ["verify"]:
                _verify(self._any(hit))

    def _side(self, name: str) -> list[Worker]:
        return {"giver": self._givers, "taker": self._takers}[name]

    def _any(self, hit: Hit) -> Worker:
        return self._workers[hit.which % len(self._workers)]

    def _cancel(self, legs: list[Leg], which: int) -> None:
        if legs:
            leg = legs[which % len(legs)]
            if leg.worker in self._workers and leg.request.reason is None:
                leg.worker.engine.cancel(leg.request)
                leg.is_cancelled = True

    def _restart(self, side: list[Worker], which: int) -> None:
        """The process is gone with its requests; another comes, whom all meet."""
        place = which % len(side)
        lost, side[place] = side[place], self._made()
        lost.port.close()
        for leg in [leg for legs in self._legs.values() for leg in legs if leg.worker is lost]:
            if not leg.is_over:
                leg.is_over = True
                self.told.ends["lost with its worker"] += 1
        self._meet()

    def _cut(self, which: int) -> None:
        """The network between two workers: both hear of it, and meet again later."""
        giver = self._givers[which % len(self._givers)]
        taker = self._takers[which % len(self._takers)]
        giver.transport.disconnect(taker.port.epoch)
        taker.transport.disconnect(giver.port.epoch)

    def _meet_junk(self, hit: Hit) -> None:
        worker = self._any(hit)
        good = bytearray(self._workers[0].port.metadata())
        good[hit.which % len(good)] ^= 1 << hit.size % 8
        for junk in (b"", bytes(hit.size), bytes(good)):
            try:
                worker.port.meet(junk)
            except BadInput:
                continue
            raise Wrong(f"a worker meets {junk!r}")

    # ---- what must hold

    def _look(self) -> None:
        for side, legs in self._legs.items():
            for leg in legs:
                if not leg.is_over:
                    self._look_at(side, leg)
        state = repr([len(leg.request.output) for leg in self._legs["take"]]).encode()
        self.told.fingerprint = zlib.crc32(state, self.told.fingerprint)

    def _look_at(self, side: str, leg: Leg) -> None:
        request, reason = leg.request, leg.request.reason
        if side == "take" and request.output != leg.expected[: len(request.output)]:
            raise Wrong(f"request {request.number} says {request.output}, not {leg.expected}")
        if reason is None:
            return
        if not _may_end(side, leg):
            raise Wrong(f"{side} {request.number} ends as {reason}: {request.refusal}")
        leg.is_over = True
        self.told.ends[f"{side}: {reason}"] += 1

    def _open_legs(self) -> list[str]:
        every = [(side, leg) for side, legs in self._legs.items() for leg in legs]
        return [
            f"{side} {leg.request.number} is {leg.request.state}"
            for side, leg in every
            if not leg.is_over
        ]

    def _settle(self) -> None:
        """Every request has ended; every page is free once prefixes are forgotten."""
        if still := self._open_legs():
            raise Wrong(f"workers are idle, and {', '.join(still)}")
        for transport in self._transports:
            for fault, count in transport.injected.items():
                self.told.faults[fault.value] += count
        for worker in self._workers:
            _verify(worker)
            worker.offload.forget_prefixes()
            stats = worker.offload.stats()
            free = stats.free_host_page_count, stats.free_index_page_count
            if free != (stats.host_page_count, stats.index_page_count):
                raise Wrong(f"pages leak: {free} are free of {stats}")


def _verify(worker: Worker) -> None:
    """What lies in slots is what the host has."""
    for layer in range(worker.offload.layout.layer_total):
        if differing := worker.offload.verify(layer):
            raise Wrong(f"layer {layer}: slots that are not what the host has: {differing[:4]}")


def _may_end(side: str, leg: Leg) -> bool:
    reason = leg.request.reason
    if reason == "cancelled":
        return leg.is_cancelled
    if reason == "refused":
        return leg.may_fail
    return reason == "sent" if side == "give" else leg.request.output == leg.expected


def play(plan: Plan) -> Outcome:
    return World(plan).play()
