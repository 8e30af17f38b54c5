"""Two workers that do both against one that prefills and one that decodes, under the same load.

In both arms two engines of one thread each run behind `ess serve`'s own server, so both have the
same two cores. Requests arrive at random times, the same in both arms, with prompts of many
lengths. The client distributes them itself: in turn over two servers of role both; or both legs of
each to the prefill and the decode worker, as a router of SGLang's dialect does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from ess import console
from ess.bench.engine.serve import started
from ess.bench.harness.measure.streaming import TimedAnswer, streamed
from ess.bench.harness.report import Row, compare
from ess.bench.harness.text import token_ids
from ess.transfer.messages import new_uid

THREADS: Final = ("--threads", "1")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedLoad:
    """`gap_s` is the mean time between arrivals, `shortest` and `longest` are prompt tokens."""

    requests: int
    gap_s: float
    shortest: int
    longest: int
    output: int
    seed: int = 1


@dataclass(frozen=True, slots=True)
class MixedArm:
    seen: list[TimedAnswer]
    took_s: float

    def tokens_per_s(self, load: MixedLoad) -> float:
        return load.requests * load.output / self.took_s

    @property
    def gaps_ms(self) -> list[float]:
        return sorted(1e3 * gap for each in self.seen for gap in each.gaps_s)

    @property
    def firsts_ms(self) -> list[float]:
        return sorted(1e3 * each.first_s for each in self.seen)


Measure = Callable[[MixedArm], float]


def mixed_rows(load: MixedLoad) -> list[Row]:
    console.note(f"  {load.requests} requests, two servers of both roles ...")
    with both_roles() as urls:
        together = asyncio.run(_run(load, [[(url, {})] for url in urls]))
    console.note(f"  {load.requests} requests, a prefill and a decode worker ...")
    with split_roles() as (prefill, decode):
        apart = asyncio.run(_run(load, [[(prefill, _leg(prefill)), (decode, _leg(prefill))]]))
    config = {
        "requests": load.requests,
        "prompt": f"{load.shortest}..{load.longest}",
        "output": load.output,
        "gap_s": load.gap_s,
    }
    pairs: tuple[tuple[str, str, Measure], ...] = (
        ("between tokens, p99", "ms", lambda arm: p99(arm.gaps_ms)),
        ("between tokens, median", "ms", lambda arm: statistics.median(arm.gaps_ms)),
        ("first token, median", "ms", lambda arm: statistics.median(arm.firsts_ms)),
        ("first token, p99", "ms", lambda arm: p99(arm.firsts_ms)),
        ("throughput", "tokens/s", lambda arm: arm.tokens_per_s(load)),
    )
    return [
        compare(
            name=f"1p1d, {name}",
            unit=unit,
            ours=[measure(apart)],
            baseline=("two that do both", [measure(together)]),
            better="higher" if unit == "tokens/s" else "lower",
            config=config,
        )
        for name, unit, measure in pairs
    ]


def p99(values: Sequence[float]) -> float:
    return values[min(len(values) - 1, int(0.99 * len(values)))]


# ---- the servers


@contextlib.contextmanager
def both_roles() -> Iterator[list[str]]:
    with started("serve", *THREADS) as (_, first), started("serve", *THREADS) as (_, second):
        yield [first, second]


@contextlib.contextmanager
def split_roles() -> Iterator[tuple[str, str]]:
    secret = {"ESS_PEER_SECRET": secrets.token_hex(16)}
    with started("prefill", *THREADS, environment=secret) as (_, prefill):
        named = ("--peers", urlsplit(prefill).netloc)
        with started("decode", *THREADS, *named, environment=secret) as (_, decode):
            yield prefill, decode


def _leg(prefill: str) -> dict[str, Any]:
    address = urlsplit(prefill)
    return {"bootstrap_host": address.hostname, "bootstrap_port": address.port}


# ---- the load

Ways = Sequence[Sequence[tuple[str, Mapping[str, Any]]]]
"""The targets of requests, in turn: one server, or several at once, each with these fields. The
last of them answers with the text."""


async def _run(load: MixedLoad, ways: Ways) -> MixedArm:
    draw = random.Random(load.seed)
    prompts = _prompts(load, draw)
    begun_s = time.monotonic()
    tasks = []
    for prompt, way in zip(prompts, itertools.cycle(ways), strict=False):
        tasks.append(asyncio.ensure_future(_ask(prompt, load.output, way)))
        await asyncio.sleep(draw.expovariate(1 / load.gap_s))
    seen = await asyncio.gather(*tasks)
    return MixedArm(list(seen), time.monotonic() - begun_s)


def _prompts(load: MixedLoad, draw: random.Random) -> list[list[int]]:
    """Parts of the text from random places: no two share a prefix."""
    ids, _ = token_ids()
    lengths = [draw.randint(load.shortest, load.longest) for _ in range(load.requests)]
    starts = [draw.randrange(len(ids) - length) for length in lengths]
    return [ids[start : start + n] for start, n in zip(starts, lengths, strict=True)]


async def _ask(
    prompt: list[int], output: int, way: Sequence[tuple[str, Mapping[str, Any]]]
) -> TimedAnswer:
    asked = {"prompt": prompt, "max_tokens": output, "ignore_eos": True, "stream": True}
    room = {"bootstrap_room": new_uid()} if len(way) > 1 else {}
    legs = [streamed(url, {**asked, **fields, **room}) for url, fields in way]
    return (await asyncio.gather(*legs))[-1]
