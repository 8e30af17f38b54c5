"""What a seed stands for, as data that can be kept and cut down."""

from __future__ import annotations

import random
from typing import Any, Final, Literal

import msgspec

from ess.overlap.tbo import Tbo
from ess.pool.lru.eviction import POLICIES
from tests.model.grid import RANDOM

TURNS: Final = 50
LINES: Final = 6
TOP_K: Final = 16
MTP_MAX: Final = {"embedded": 6, "deepseek_v32": 6, "glm_moe_dsa": 6, "deepseek_v4": 4}
STATEFUL: Final = ("glm5_next", "deepseek_v4")
COMPILED: Final = ("deepseek_v32", "glm_moe_dsa", "embedded")
ROW_FORMS: Final = ("f32", "bf16", "fp8")
DRIFTS: Final = 0.4
CROWDS: Final = 0.3

Happening = Literal["cancel", "preempt", "forget", "verify", "rebalance"]
HAPPENINGS: Final[tuple[Happening, ...]] = Happening.__args__
WISHES: Final = ("greedy", "warm", "cut", "penalised", "bound", "ended", "told", "scored", "mixed")
"""Drawn: from all chances, from some of them, behind penalties, among few ids without bad words,
to an end that is not near, with chances of the answer, with those of the prompt, and with several
of these at once."""
OF_TEXT: Final = ("grammar", "stop", "mixed text")
"""For the model with a tokenizer."""
FAMILIES: Final = (*RANDOM, "embedded")


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A request, and `more` that share its prompt; its first `said` tokens were said before."""

    at: int
    line: int
    length: int
    tokens: int
    wish: str
    seed: int = 0
    priority: int = 0
    salt: int = 0
    more: int = 0
    said: int = 0


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """`which` request is struck, or whose turn `size` bounds."""

    at: int
    what: Happening
    which: int
    size: int


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """`engine` are settings; slots of `chunks` pages a group; of requests `lines` run at a time;
    drafts are right with the chance `right`; with `drifts` settings change at every turn."""

    seed: int
    family: str
    form: str
    engine: dict[str, Any]
    evict: str
    chunks: int
    slot_floor: int
    host_pages: int
    index_pages: int
    lines: int
    delay_max: int
    right: float
    asks: tuple[Ask, ...]
    hits: tuple[Hit, ...]
    drifts: bool = False


PLAIN: Final[dict[str, Any]] = {
    "modes": "none",
    "mtp": 1,
    "tbo": "off",
    "sbo": "off",
    "depth": 0,
    "deterministic": False,
    "promise": "all",
    "warm": True,
    "budget_every": 0,
    "verify_every": 0,
    "backend": "cpu",
}
"""What settings are cut down to, where a life fails all the same."""


def drawn(seed: int, families: tuple[str, ...] = FAMILIES) -> Life:
    draw = random.Random(seed)
    family = draw.choice(families)
    page = 256 if family == "deepseek_v4" else 64
    form = draw.choices(ROW_FORMS, (8, 1, 1))[0] if family != "deepseek_v4" else "f32"
    settings = _settings(draw, family)
    lengths = _lengths(draw, page, settings["chunk_tokens"])
    may_wish = (*WISHES, *OF_TEXT) if family == "embedded" else WISHES
    wishes = draw.sample(may_wish, draw.choice((1, 2, len(may_wish))))
    if form != "f32":
        wishes = ["greedy"]
    happenings = [each for each in HAPPENINGS if draw.random() < 0.5]
    hit_count = draw.randint(0, 8) if happenings else 0
    life = Life(
        seed=seed,
        family=family,
        form=form,
        engine=settings,
        evict=draw.choice(POLICIES),
        chunks=draw.choice((1, 1, 2, 4, 40)),
        slot_floor=draw.choice((TOP_K, 24, 64)),
        host_pages=draw.choice((7, 10, 20, 60)),
        index_pages=draw.choice((6, 8, 40)),
        lines=draw.choice((1, 2, 3, 8)),
        delay_max=draw.choice((0, 3, 20)),
        right=draw.choice((0.0, 0.5, 0.9, 1.0)),
        asks=tuple(drawn_ask(draw, lengths, wishes) for _ in range(draw.randint(1, 8))),
        hits=tuple(
            Hit(
                at=draw.randrange(TURNS),
                what=draw.choice(happenings),
                which=draw.randrange(8),
                size=draw.randint(1, 12),
            )
            for _ in range(hit_count)
        ),
        drifts=not settings["deterministic"] and draw.random() < DRIFTS,
    )
    return crowded(life) if draw.random() < CROWDS else life


def crowded(life: Life) -> Life:
    """Its requests come in the first turns, and there is room for eight at a time. In other lives
    three seldom run at once."""
    return msgspec.structs.replace(
        life,
        engine={**life.engine, "max_running": 16},
        host_pages=60,
        index_pages=40,
        lines=8,
        asks=tuple(msgspec.structs.replace(ask, at=ask.at % 4) for ask in life.asks),
    )


def _settings(draw: random.Random, family: str) -> dict[str, Any]:
    modes = draw.choice(("layerwise", "resident", "none", "none", "da", "dba"))
    alike = modes in ("none", "layerwise") and family in COMPILED and draw.random() < 0.4
    halves: Tbo = draw.choice(("off", "on", 3))
    if alike or family == "deepseek_v4":
        halves = "off"
    orders = ("off", "combine-down", "combine-shared", "dispatch-shared")
    whole = alike or family == "deepseek_v4"
    return {
        "modes": modes,
        "mtp": min(draw.choice((1, 2, 3, 4, 6)), MTP_MAX.get(family, 1)),
        "tbo": halves,
        "sbo": "off" if whole else draw.choice(orders),
        "depth": draw.choice((0, 1)),
        "deterministic": alike,
        "promise": draw.choice(("all", "some")),
        "warm": draw.choice((True, False)),
        "budget_every": draw.choice((0, 2, 7)),
        "verify_every": draw.choice((0, 1, 3)),
        "chunk_tokens": draw.choice((1, 16, 63, 64, 65, 96, 130, 512)),
        "max_running": draw.choice((1, 2, 5, 16)),
        "query_max": draw.choice((4, 7, 64)),
        "backend": "cpu"
        if family in STATEFUL or alike
        else draw.choice(("cpu",) * 4 + ("reference",)),
    }


def _lengths(draw: random.Random, page: int, chunk: int) -> list[int]:
    """At the edges of pages, chunks and selections, and anywhere."""
    edges = (1, TOP_K, page, 2 * page, 3 * page, chunk, 2 * chunk, page + chunk)
    near = {edge + by for edge in edges for by in (-1, 0, 1, 2)}
    return [max(1, min(length, 3 * page + 40)) for length in near] + [draw.randint(1, 3 * page)]


def drawn_ask(draw: random.Random, lengths: list[int], wishes: list[str]) -> Ask:
    tokens = draw.choice((1, 2, 5, 12, 24, 40))
    return Ask(
        at=draw.randrange(TURNS),
        line=draw.randrange(LINES),
        length=draw.choice(lengths),
        tokens=tokens,
        wish=draw.choice(wishes),
        seed=draw.choice((0, 7, (1 << 64) - 1, -(1 << 63))),
        priority=draw.choice((0, 0, 0, 1, -5)),
        salt=draw.choice((0, 0, 0, 1)),
        more=draw.choice((0, 0, 0, 1, 3)),
        said=draw.randrange(tokens) if draw.random() < 0.2 else 0,
    )
