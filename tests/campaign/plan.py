"""What a seed stands for: workers, requests and faults, as data that can be kept and cut down."""

from __future__ import annotations

import random
from typing import Final, Literal

import msgspec

from ess.transfer.transports.faulty import Fault

Strike = Literal[
    "cancel give",
    "cancel take",
    "restart giver",
    "restart taker",
    "cut",
    "freeze giver",
    "freeze taker",
    "leap",
    "junk",
    "forget",
    "verify",
]
STRIKES: Final[tuple[Strike, ...]] = Strike.__args__
SORTS: Final = ("whole", "alone", "never given", "never taken", "foreign", "twice", "too long")
"""Of requests: both legs as they should be; without a handoff; with one leg; a take that names
another prompt's rows; a number given twice; a prompt beyond every limit."""
PROMPTS: Final = 12
TOKENS_MAX: Final = 8
TURNS: Final = 60


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request. Its legs begin at their own turns, in either order."""

    sort: str
    prompt: int
    tokens: int
    giver: int
    taker: int
    give_at: int
    take_at: int
    priority: int = 0


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that strikes at a turn. `which` is a worker or a request, `size` how far it goes."""

    at: int
    strike: Strike
    which: int
    size: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    giver_count: int
    taker_count: int
    mtp: int
    depth: int
    modes: str
    evict: str
    promise: str
    chunk: int
    failure: str
    host_pages: int
    index_pages: int
    slot_pages: int
    lines: int
    delay_max: int
    wait_s: float
    lease_s: float
    odds: dict[str, float]
    asks: tuple[Ask, ...]
    hits: tuple[Hit, ...]


def drawn(seed: int) -> Plan:
    """Every class of faults is on or off as a whole: some hide others."""
    draw = random.Random(seed)
    workers = {"giver_count": draw.choice([1, 1, 2]), "taker_count": draw.choice([1, 1, 2])}
    faults = [fault.value for fault in Fault if draw.random() < 0.3]
    strikes = [strike for strike in STRIKES if draw.random() < 0.4]
    sorts = ["whole", *(sort for sort in SORTS if draw.random() < 0.4)]
    return Plan(
        seed=seed,
        **workers,
        mtp=draw.choice([1, 2]),
        depth=draw.choice([0, 1]),
        modes=draw.choice(["layerwise", "resident", "none", "da", "dba"]),
        evict=draw.choice(["lru", "lru", "sieve", "score"]),
        promise=draw.choice(["all", "some"]),
        chunk=draw.choice([16, 64, 100]),
        failure=draw.choice(["recompute", "recompute", "refuse"]),
        host_pages=draw.choice([12, 24, 48]),
        index_pages=draw.choice([8, 24]),
        slot_pages=draw.choice([2, 4, 8]),
        lines=draw.choice([1, 2, 4]),
        delay_max=draw.choice([0, 3, 20]),
        wait_s=draw.choice([0.05, 0.5]),
        lease_s=draw.choice([0.05, 0.5]),
        odds={fault: draw.choice([0.01, 0.05]) for fault in faults},
        asks=tuple(_ask(draw, sorts, workers) for _ in range(draw.randint(1, 5))),
        hits=tuple(_hit(draw, strikes) for _ in range(draw.randint(1, 5) if strikes else 0)),
    )


def _ask(draw: random.Random, sorts: list[str], workers: dict[str, int]) -> Ask:
    begins = draw.randrange(TURNS // 2)
    later = draw.choice([0, 0, 0, 3, 20])
    legs = (begins, begins + later) if draw.random() < 0.5 else (begins + later, begins)
    return Ask(
        sort=draw.choice(sorts),
        prompt=draw.randrange(PROMPTS),
        tokens=draw.randint(1, TOKENS_MAX),
        giver=draw.randrange(workers["giver_count"]),
        taker=draw.randrange(workers["taker_count"]),
        give_at=legs[0],
        take_at=legs[1],
        priority=draw.choice([0, 0, 1]),
    )


def _hit(draw: random.Random, strikes: list[Strike]) -> Hit:
    at, which = draw.randrange(TURNS), draw.randrange(8)
    return Hit(at=at, strike=draw.choice(strikes), which=which, size=draw.randint(1, 30))
