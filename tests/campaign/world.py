"""A plan, played: turn by turn, every worker checked, every answer held against one engine's."""

from __future__ import annotations

import functools
import random
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ess.door.stats import Stats
from ess.engine.plan import StepResult
from ess.engine.requests.request import Request, Take
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput, PoolFull, Unavailable
from ess.pool.disk.use import DiskUse
from tests.campaign.cluster import AnyWorker, Cluster, Kind
from tests.campaign.drafts import Drafts, made_by
from tests.campaign.families import FAMILIES, others, prompts
from tests.campaign.plan import TOKENS_MAX, TURNS, Ask, Hit, Plan
from tests.pd.rigs import alone

STEP_S = 0.01
LATE_STEP_S = 0.05
TURNS_MAX = 800
MEET_EVERY = 10
TOO_LONG = 1100
ENDS_EVERY = 16
"""Of all ids, those that end a warm answer."""
SALTS = (b"", b"a tenant", b"another tenant")


class Wrong(AssertionError):
    """What must never be: an answer that is not the reference's, a page that is not free again."""


@functools.cache
def answer(family: str, prompt: int, *, is_warm: bool) -> list[int]:
    """What one engine says that nothing happens to."""
    wish = _wish(family, TOKENS_MAX, is_warm=is_warm)
    return alone([(prompts(family)[prompt], wish)], model=FAMILIES[family].model())[0]


def _wish(family: str, count: int, *, is_warm: bool) -> Sampling:
    """A warm answer may end at any token of a step."""
    ends = frozenset(range(0, FAMILIES[family].vocabulary, ENDS_EVERY))
    heat = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "stop_ids": ends} if is_warm else {}
    return Sampling(tokens_max=count, ignore_eos=True, **heat)


@dataclass(eq=False)
class Leg:
    """One request at one worker. `may_fail` says that it may be refused."""

    worker: AnyWorker
    request: Request
    expected: list[int]
    may_fail: bool = False
    is_cancelled: bool = False
    is_over: bool = False
    end: tuple[object, ...] = ()
    told: list[int] = field(default_factory=list)
    """The tokens in the results of steps, which a server streams."""


@dataclass
class Outcome:
    """`faults` by class, `ends` of legs by kind, what else was `seen`; a plan has the same
    `fingerprint` each time."""

    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    fingerprint: int = 0


class World:
    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self.plan = plan
        self.told = Outcome()
        self._cluster = cluster
        self._last = max([TURNS, *(max(ask.give_at, ask.take_at) for ask in plan.asks)])
        self._draw = random.Random(plan.seed)
        self._frozen: dict[AnyWorker, int] = {}
        self._legs: dict[str, list[Leg]] = {"give": [], "take": []}
        self._hunted: list[str] = []
        self._held: list[tuple[int, Leg]] = []

    # ---- a turn

    def play(self) -> Outcome:
        vocabulary = FAMILIES[self.plan.family].vocabulary
        drafts = Drafts(
            self._texts, vocabulary=vocabulary, right=self.plan.right, seed=self.plan.seed
        )
        with made_by(drafts):
            self._play()
        self.told.seen["right drafts"] = drafts.right_count
        return self.told

    def _texts(self) -> dict[Any, list[int]]:
        legs = [leg for leg in self._legs["take"] if leg.request.sequence is not None]
        return {leg.request.sequence: leg.request.prompt + leg.expected for leg in legs}

    def _play(self) -> None:
        for turn in range(TURNS_MAX):
            self._cluster.clock.advance(STEP_S if turn < self._last else LATE_STEP_S)
            self._begin(turn)
            self._step(turn)
            self._look()
            if turn > self._last and self._is_quiet():
                self.told.seen["turns"] = turn
                self._settle()
                return
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
        self._hunt()
        self._resume(turn)
        if turn % MEET_EVERY == 0:
            self._cluster.meet()

    def _step(self, turn: int) -> None:
        workers = self._cluster.all
        self._draw.shuffle(workers)
        for worker in workers:
            if self._frozen.get(worker, 0) <= turn:
                self._note(worker, worker.step())
        self._cluster.advance()

    def _note(self, worker: AnyWorker, result: StepResult | None) -> None:
        legs = [leg for leg in self._legs["take"] if leg.worker is worker]
        for made in () if result is None else result.made:
            for leg in legs:
                leg.told += made.tokens if leg.request is made.request else ()
        for leg in legs:
            if leg.told != leg.request.output:
                raise Wrong(f"request {leg.request.number} said {leg.request.output}: {leg.told}")

    def _is_quiet(self) -> bool:
        return not self._held and all(worker.is_quiet for worker in self._cluster.all)

    # ---- requests

    def _give(self, number: int, ask: Ask) -> None:
        if ask.sort in ("alone", "fork", "never given", "too long"):
            return
        prompt = (others if ask.sort == "foreign" else prompts)(self.plan.family)[ask.prompt]
        salt = SALTS[2] if ask.sort == "foreign salt" else SALTS[ask.salt]
        worker, wish = self._cluster.of["giver"][ask.giver], Sampling(tokens_max=1)
        for turn in range(2 if ask.sort == "twice" else 1):
            request = worker.engine.add(prompt, wish, give=number, salt=salt)
            self._legs["give"].append(Leg(worker, request, [], may_fail=turn > 0))

    def _take(self, number: int, ask: Ask) -> None:
        if ask.sort == "never taken":
            return
        if ask.sort == "too long":
            self._refused(ask)
            return
        leader = None
        for _ in range(2 if ask.sort == "fork" else 1):
            leader = self._taken(number, ask, leader)

    def _taken(self, number: int, ask: Ask, leader: Request | None) -> Request:
        worker = self._cluster.of["taker"][ask.taker]
        is_here = ask.sort in ("alone", "fork")
        take = None if is_here else Take(number, self._cluster.of["giver"][ask.giver].port.epoch)
        request = worker.engine.add(
            prompts(self.plan.family)[ask.prompt],
            _wish(self.plan.family, ask.tokens, is_warm=ask.is_warm),
            take=take,
            priority=ask.priority,
            salt=SALTS[ask.salt],
            leader=leader,
        )
        may_fail = take is not None and self.plan.failure == "refuse"
        expected = answer(self.plan.family, ask.prompt, is_warm=ask.is_warm)[: ask.tokens]
        self._legs["take"].append(Leg(worker, request, expected, may_fail=may_fail))
        return request

    def _refused(self, ask: Ask) -> None:
        worker = self._cluster.of["taker"][ask.taker]
        try:
            worker.engine.add([0] * TOO_LONG, _wish(self.plan.family, 1, is_warm=False))
        except BadInput:
            self.told.ends["take: not let in"] += 1
        else:
            raise Wrong(f"a prompt of {TOO_LONG} tokens is let in")

    # ---- faults

    def _strike(self, hit: Hit, turn: int) -> None:
        match hit.strike.split():
            case ["cancel", "give" | "take" as side]:
                self._cancel_one(self._legs[side], hit.which)
            case ["cancel", state]:
                self._hunted.append(state)
                return
            case ["preempt"]:
                self._preempt(hit, turn)
                return
            case ["restart", side]:
                self._restart(side, hit.which)
            case ["freeze", side]:
                workers = self._cluster.of[side]
                self._frozen[workers[hit.which % len(workers)]] = turn + hit.size
            case ["cut"]:
                self._cut(hit.which)
            case ["leap"]:
                self._cluster.clock.advance(0.3 * hit.size)
            case ["junk"]:
                self._meet_junk(hit)
            case ["forget"]:
                self._any(hit).forget()
            case ["verify"]:
                _verify(self._any(hit))
        self.told.faults[hit.strike] += 1

    def _any(self, hit: Hit) -> AnyWorker:
        workers = self._cluster.all
        return workers[hit.which % len(workers)]

    def _cancel_one(self, legs: list[Leg], which: int) -> None:
        if legs:
            self._cancel(legs[which % len(legs)])

    def _cancel(self, leg: Leg) -> None:
        if leg.worker in self._cluster.all and leg.request.reason is None:
            leg.worker.engine.cancel(leg.request)
            leg.is_cancelled = True

    def _hunt(self) -> None:
        """A request that is to be cancelled in a state, as soon as some request is in it."""
        for state in [*self._hunted]:
            here = [leg for leg in self._open() if leg.request.state == state]
            if here:
                self._hunted.remove(state)
                self._cancel(self._draw.choice(here))
                self.told.faults[f"cancel {state}"] += 1

    def _preempt(self, hit: Hit, turn: int) -> None:
        takes = [leg for leg in self._open() if leg in self._legs["take"]]
        running = [leg for leg in takes if leg.request.state in ("prefilling", "decoding")]
        if running:
            leg = running[hit.which % len(running)]
            leg.worker.engine.preempt(leg.request)
            self._held.append((turn + hit.size, leg))
            self.told.faults["preempt"] += 1

    def _resume(self, turn: int) -> None:
        """Those whose time is over go on, when there is room."""
        for due, leg in [*self._held]:
            is_there = leg.worker in self._cluster.all and leg.request.state == "preempted"
            if is_there and due > turn:
                continue
            if is_there and leg.request.is_held:
                try:
                    leg.worker.engine.resume(leg.request)
                except PoolFull:
                    continue
            self._held.remove((due, leg))

    def _restart(self, side: Kind, which: int) -> None:
        lost = self._cluster.restart(side, which % len(self._cluster.of[side]))
        for leg in self._open():
            if leg.worker is lost:
                leg.is_over = True
                self.told.ends["lost with its worker"] += 1

    def _cut(self, which: int) -> None:
        """The network between two workers: both hear of it, and meet again later."""
        giver = self._cluster.of["giver"][which % len(self._cluster.of["giver"])]
        taker = self._cluster.of["taker"][which % len(self._cluster.of["taker"])]
        here = giver.transports[which % len(giver.transports)]
        there = taker.transports[0]
        here.disconnect(there.epoch)
        there.disconnect(here.epoch)

    def _meet_junk(self, hit: Hit) -> None:
        worker = self._any(hit)
        good = bytearray(self._cluster.all[0].metadata())
        good[hit.which % len(good)] ^= 1 << hit.size % 8
        for junk in (b"", bytes(hit.size), bytes(good)):
            try:
                worker.port.meet(junk)
            except BadInput:
                continue
            raise Wrong(f"a worker meets {junk!r}")

    # ---- what must hold

    def _every(self) -> list[tuple[str, Leg]]:
        return [(side, leg) for side, legs in self._legs.items() for leg in legs]

    def _open(self) -> list[Leg]:
        return [leg for _, leg in self._every() if not leg.is_over]

    def _look(self) -> None:
        for side, leg in self._every():
            if not leg.is_over:
                self._look_at(side, leg)
            elif leg.end and leg.end != _end_of(leg):
                raise Wrong(f"request {leg.request.number} ended twice: {leg.end}, {_end_of(leg)}")
        state = repr([len(leg.request.output) for leg in self._legs["take"]]).encode()
        self.told.fingerprint = zlib.crc32(state, self.told.fingerprint)

    def _look_at(self, side: str, leg: Leg) -> None:
        request, reason = leg.request, leg.request.reason
        if side == "take" and request.output != leg.expected[: len(request.output)]:
            raise Wrong(f"request {request.number} says {request.output}, not {leg.expected}")
        if reason is None:
            return
        if not self._may_end(side, leg):
            raise Wrong(f"{side} {request.number} ends as {reason}: {request.refusal}")
        leg.is_over, leg.end = True, _end_of(leg)
        self.told.seen["rows found cached"] += request.cached_count
        self.told.ends[f"{side}: {reason}"] += 1

    def _may_end(self, side: str, leg: Leg) -> bool:
        request = leg.request
        if request.reason == "cancelled":
            return leg.is_cancelled
        if request.reason == "refused":
            is_unread = self.plan.has_bad_disks and isinstance(request.refusal, Unavailable)
            return leg.may_fail or is_unread
        return request.reason == "sent" if side == "give" else request.output == leg.expected

    def _open_legs(self) -> list[str]:
        return [
            f"{side} {leg.request.number} is {leg.request.state}"
            for side, leg in self._every()
            if not leg.is_over
        ]

    def _settle(self) -> None:
        """Every request has ended; every page is free once prefixes are forgotten."""
        if still := self._open_legs():
            raise Wrong(f"workers are idle, and {', '.join(still)}")
        self.told.faults += self._cluster.count()
        for worker in self._cluster.all:
            _verify(worker)
            self.told.seen["preemptions"] += getattr(worker.engine, "preempted_count", 0)
            for offload in worker.offloads:
                self._count_disk(offload.stats().disk)
                offload.forget_prefixes()
                offload.check()
                _check_free(offload.stats())

    def _count_disk(self, disk: DiskUse | None) -> None:
        if disk is not None:
            for name in ("stored", "loaded", "damaged"):
                self.told.seen[f"pages {name}"] += getattr(disk, f"{name}_count")


def _end_of(leg: Leg) -> tuple[object, ...]:
    return leg.request.reason, *leg.request.output


def _check_free(stats: Stats) -> None:
    free = stats.free_host_page_count, stats.free_index_page_count
    if free != (stats.host_page_count, stats.index_page_count):
        raise Wrong(f"pages leak: {free} are free of {stats}")
    if stats.used_slot_count.any():
        raise Wrong(f"slots leak: {stats.used_slot_count} are used")
    if stats.disk is not None and stats.disk.page_count:
        raise Wrong(f"the disk keeps {stats.disk.page_count} pages that are forgotten")


def _verify(worker: AnyWorker) -> None:
    """What lies in slots is what the host has."""
    for offload in worker.offloads:
        for layer in range(offload.layout.layer_total):
            if differing := offload.verify(layer):
                raise Wrong(f"layer {layer}: slots unlike the host's rows: {differing[:4]}")


def play(plan: Plan) -> Outcome:
    cluster = Cluster(plan)
    try:
        return World(plan, cluster).play()
    finally:
        cluster.close()
