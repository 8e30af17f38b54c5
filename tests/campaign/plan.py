"""What a seed stands for: workers, requests and faults, as data that can be kept and cut down."""

from __future__ import annotations

import random
from typing import Final, Literal

import msgspec

from ess.transfer.transports.faulty import Fault
from tests.campaign.disks import DISK_FAULTS

Strike = Literal[
    "cancel give",
    "cancel take",
    "cancel waiting",
    "cancel landing",
    "cancel loading",
    "cancel prefilling",
    "cancel decoding",
    "cancel preempted",
    "preempt",
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
SORTS: Final = (
    *("whole", "alone", "fork", "never given", "never taken"),
    *("foreign", "foreign salt", "twice", "too long"),
)
"""Of requests: both legs as they should be; without a handoff; two answers to one prompt; with one
leg; a take that names another prompt's rows, or those of another salt; a number given twice; a
prompt beyond every limit."""
FINAL: Final = ("disk full", "catalogue fails")
"""Behind these a disk stores nothing any more."""
PROMPTS: Final = 12
LONG: Final = range(5, PROMPTS)
"""Prompts of more than a page."""
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
    salt: int = 0
    is_warm: bool = False


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that strikes at a turn. `which` is a worker or a request, `size` how far it goes."""

    at: int
    strike: Strike
    which: int
    size: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`stages` of a giver that is a pipeline, 0 where it is an engine; `disks` says who has one;
    with `drifts` the settings of engines change at every turn."""

    seed: int
    giver_count: int
    taker_count: int
    stages: int
    mtp: int
    depth: int
    modes: str
    tbo: str | int
    deterministic: bool
    evict: str
    promise: str
    warm: bool
    budget_every: int
    verify_every: int
    chunk: int
    failure: str
    host_pages: int
    index_pages: int
    slot_pages: int
    lines: int
    delay_max: int
    is_ragged: bool
    wait_s: float
    lease_s: float
    disks: str
    disk_pages: int
    disk_delay: int
    odds: dict[str, float]
    disk_odds: dict[str, float]
    asks: tuple[Ask, ...]
    hits: tuple[Hit, ...]
    family: str = "small"
    drifts: bool = False

    @property
    def right(self) -> float:
        """The chance of a draft to be right."""
        return self.seed % 4 / 3

    @property
    def has_bad_disks(self) -> bool:
        return self.disks != "none" and bool(self.disk_odds)


PLAIN: Final = {
    "stages": 0,
    "mtp": 1,
    "depth": 0,
    "modes": "none",
    "tbo": "off",
    "deterministic": False,
    "evict": "lru",
    "promise": "all",
    "budget_every": 0,
    "verify_every": 0,
    "delay_max": 0,
    "is_ragged": False,
    "disks": "none",
    "disk_delay": 0,
    "drifts": False,
}
"""What a plan is cut down to, where it fails all the same."""


def drawn(seed: int) -> Plan:
    """Every class of faults is on or off as a whole: some hide others."""
    draw = random.Random(seed)
    workers = {"giver_count": draw.choice([1, 1, 2]), "taker_count": draw.choice([1, 1, 2])}
    faults = [fault.value for fault in Fault if draw.random() < 0.3]
    strikes = [strike for strike in STRIKES if draw.random() < 0.4]
    sorts = ["whole", *(sort for sort in SORTS if draw.random() < 0.4)]
    rooms = _rooms(draw)
    again = rooms["disks"] != "none" and draw.random() < 0.7
    prompts = LONG if again else range(PROMPTS)
    prompts = draw.sample(prompts, draw.choice([1, 3, len(prompts)]))
    ask_count, hit_count = draw.randint(1, 5), draw.randint(1, 6) if strikes else 0
    plan = Plan(
        seed=seed,
        **workers,
        **_settings(draw),
        **rooms,
        odds={fault: draw.choice([0.01, 0.05]) for fault in faults},
        disk_odds={
            fault: 0.03 if fault in FINAL else 0.2 for fault in DISK_FAULTS if draw.random() < 0.25
        },
        asks=tuple(_ask(draw, sorts, prompts, workers) for _ in range(ask_count)),
        hits=tuple(_hit(draw, strikes) for _ in range(hit_count)),
    )
    plan = _asked_again(plan, draw) if again else plan
    drifts = not plan.deterministic and draw.random() < 0.5
    return msgspec.structs.replace(plan, drifts=drifts)


def of_v4(plan: Plan) -> Plan:
    """The same of DeepSeek-V4, without what it lacks. Pages are of four times as many tokens."""
    lacks = ("stages", "tbo", "deterministic", "disks")
    without = {name: PLAIN[name] for name in lacks}
    return msgspec.structs.replace(
        plan, family="deepseek_v4", chunk=4 * plan.chunk, disk_odds={}, **without
    )


def _asked_again(plan: Plan, draw: random.Random) -> Plan:
    """The same requests once more, at workers that have been started again meanwhile: what the
    disk has comes back."""
    asks = tuple(
        msgspec.structs.replace(ask, give_at=ask.give_at + TURNS, take_at=ask.take_at + TURNS)
        for ask in plan.asks
    )
    strikes: tuple[Strike, ...] = ("restart giver", "restart taker")
    hits = tuple(
        Hit(at=TURNS - 1, strike=strike, which=which, size=1)
        for strike in strikes
        for which in range(2)
        if draw.random() < 0.7
    )
    return msgspec.structs.replace(plan, asks=plan.asks + asks, hits=plan.hits + hits)


def _settings(draw: random.Random) -> dict[str, object]:
    modes = draw.choice(["layerwise", "resident", "none", "da", "dba"])
    deterministic = modes == "none" and draw.random() < 0.3
    return {
        "stages": draw.choice([0, 0, 0, 1, 2, 2]),
        "mtp": draw.choice([1, 2, 4]),
        "depth": draw.choice([0, 1]),
        "modes": modes,
        "deterministic": deterministic,
        "tbo": "off" if deterministic else draw.choice(["off", "off", 1]),
        "evict": draw.choice(["lru", "lru", "sieve", "score"]),
        "promise": draw.choice(["all", "some"]),
        "warm": draw.choice([True, True, False]),
        "budget_every": draw.choice([0, 2, 64]),
        "verify_every": draw.choice([0, 1]),
        "chunk": draw.choice([16, 63, 100]),
        "failure": draw.choice(["recompute", "recompute", "refuse"]),
    }


def _rooms(draw: random.Random) -> dict[str, object]:
    """Beside a disk the host is small: what it forgets comes back."""
    disks = draw.choice(["none", "none", "takers", "givers", "all"])
    return {
        "host_pages": draw.choice([8, 12, 24, 48] if disks == "none" else [5, 6, 8]),
        "index_pages": draw.choice([8, 24]),
        "slot_pages": draw.choice([2, 4, 8]),
        "lines": draw.choice([1, 2, 4]),
        "delay_max": draw.choice([0, 3, 20]),
        "is_ragged": draw.choice([True, False]),
        "wait_s": draw.choice([0.05, 0.5]),
        "lease_s": draw.choice([0.05, 0.5]),
        "disks": disks,
        "disk_pages": draw.choice([3, 10, 40]),
        "disk_delay": draw.choice([0, 0, 3, 20]),
    }


def _ask(draw: random.Random, sorts: list[str], prompts: list[int], workers: dict[str, int]) -> Ask:
    begins = draw.randrange(TURNS)
    later = draw.choice([0, 0, 0, 3, 20])
    legs = (begins, begins + later) if draw.random() < 0.5 else (begins + later, begins)
    return Ask(
        sort=draw.choice(sorts),
        prompt=draw.choice(prompts),
        tokens=draw.randint(1, TOKENS_MAX),
        giver=draw.randrange(workers["giver_count"]),
        taker=draw.randrange(workers["taker_count"]),
        give_at=legs[0],
        take_at=legs[1],
        priority=draw.choice([0, 0, 1]),
        salt=draw.choice([0, 0, 0, 1]),
        is_warm=draw.choice([True, False]),
    )


def _hit(draw: random.Random, strikes: list[Strike]) -> Hit:
    at, which = draw.randrange(TURNS), draw.randrange(8)
    return Hit(at=at, strike=draw.choice(strikes), which=which, size=draw.randint(1, 30))
