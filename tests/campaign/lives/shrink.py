"""The fewest requests, happenings and settings of a life that still fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from tests.campaign.lives.plan import PLAIN, Life


def shrunk(life: Life, fails: Callable[[Life], bool]) -> Life:
    """Parts are left out, one at a time, until none can be."""
    while True:
        smaller = next((less for less in _less(life) if fails(less)), None)
        if smaller is None:
            return life
        life = smaller


def _less(life: Life) -> Iterator[Life]:
    replace = msgspec.structs.replace
    for name in ("asks", "hits"):
        listed = getattr(life, name)
        for at in range(len(listed)):
            yield replace(life, **{name: listed[:at] + listed[at + 1 :]})
    for name, plain in PLAIN.items():
        if life.engine[name] != plain:
            yield replace(life, engine={**life.engine, name: plain})
    for at, ask in enumerate(life.asks):
        for less in ({"more": 0}, {"said": 0}, {"salt": 0}, {"priority": 0}, {"wish": "greedy"}):
            if any(getattr(ask, name) != value for name, value in less.items()):
                asks = (*life.asks[:at], replace(ask, **less), *life.asks[at + 1 :])
                yield replace(life, asks=asks)
    if life.drifts:
        yield replace(life, drifts=False)
    if life.evict != "lru":
        yield replace(life, evict="lru")
    if life.delay_max:
        yield replace(life, delay_max=0)
