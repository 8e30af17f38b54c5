"""End to end, under the same load of long prompts: a prefill worker of two stages and two decode
workers behind a stock router, against one `ess serve`. Engines have a thread each.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import dataclass
from typing import Final

from ess import console
from ess.bench.engine.serve import started
from ess.bench.handoff.mixed import Measure, MixedArm, p99
from ess.bench.harness.measure.streaming import streamed
from ess.bench.harness.report import Row, compare
from ess.bench.harness.text import token_ids
from ess.bench.prefill.rig import cores
from ess.bench.prefill.routers import chosen, tier
from ess.errors import BadState
from ess.models.load import EMBEDDED
from ess.models.text.tokenizer import Tokenizer

STAGES: Final = 2
DECODES: Final = 2
THREADS: Final = ("--threads", "1")
UP_S: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """Prompts of about `length` tokens, as text; `gap_s` is the mean time between arrivals."""

    requests: int
    gap_s: float
    length: int
    output: int
    seed: int = 1

    def prompts(self) -> list[str]:
        ids, _ = token_ids()
        draw, tokenizer = random.Random(self.seed), Tokenizer(EMBEDDED)
        doubled = ids * (self.length // len(ids) + 2)
        starts = [draw.randrange(len(ids)) for _ in range(self.requests)]
        return [tokenizer.decode(doubled[start : start + self.length]) for start in starts]


MEASURES: Final[tuple[tuple[str, str, Measure], ...]] = (
    ("first token, p50", "ms", lambda arm: statistics.median(arm.firsts_ms)),
    ("first token, p99", "ms", lambda arm: p99(arm.firsts_ms)),
    ("between tokens, p50", "ms", lambda arm: statistics.median(arm.gaps_ms)),
    ("between tokens, p99", "ms", lambda arm: p99(arm.gaps_ms)),
    ("all of it", "s", lambda arm: arm.took_s),
)


def serving_rows(talk: Talk, *, router: str) -> list[Row]:
    chosen(router)
    console.note(f"  one ess serve, {talk.requests} prompts of {talk.length:,} tokens ...")
    with started("serve", *THREADS) as (_, url):
        asyncio.run(_until_up(url))
        alone = asyncio.run(_streamed_all(talk, url))
    console.note(f"  PP{STAGES} and {DECODES} decode workers behind a router ...")
    with tier(STAGES, DECODES, *THREADS, router=router) as split:
        asyncio.run(_until_up(split.url))
        before = split.handoffs(1)
        apart = asyncio.run(_streamed_all(talk, split.url))
        ended = split.handoffs(before.total() + talk.requests) - before
    config = {
        "router": split.router,
        "handoffs": ", ".join(f"{ended[how]} {how}" for how in ("landed", "missed")),
        "prompt": talk.length,
        "requests": talk.requests,
        "gap_s": round(talk.gap_s, 3),
        "output": talk.output,
        "cores": f"{cores()} for {STAGES + DECODES} engines, against 1",
    }
    return [
        compare(
            name=f"PP{STAGES} x {DECODES} decode, {what}",
            unit=unit,
            ours=[measure(apart)],
            baseline=("one ess serve", [measure(alone)]),
            config=config,
        )
        for what, unit, measure in MEASURES
    ]


async def _until_up(url: str) -> None:
    """Waits for a router, which listens before it finds its workers and refuses until then. The
    prompt that it first answers is handed over too, and is not one of those measured."""
    deadline_s = time.monotonic() + UP_S
    while True:
        try:
            await streamed(url, _request_body("Every worker says a word.", 2))
            return
        except (OSError, BadState):
            if time.monotonic() > deadline_s:
                raise
        await asyncio.sleep(0.5)


async def _streamed_all(talk: Talk, url: str) -> MixedArm:
    draw, begun_s, tasks = random.Random(talk.seed), time.monotonic(), []
    for prompt in talk.prompts():
        tasks.append(asyncio.ensure_future(streamed(url, _request_body(prompt, talk.output))))
        await asyncio.sleep(draw.expovariate(1 / talk.gap_s))
    seen = await asyncio.gather(*tasks)
    return MixedArm(list(seen), time.monotonic() - begun_s)


def _request_body(prompt: str, output: int) -> dict[str, object]:
    return {
        "model": "ess-embedded",
        "prompt": prompt,
        "max_tokens": output,
        "ignore_eos": True,
        "stream": True,
    }
