"""End to end, under the same load of long prompts: `ess serve --pd`, whose prefill worker has two
stages, against one `ess serve`. Engines have a thread each.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
import re
import statistics
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ess import console
from ess.bench.engine.serve import launched, started
from ess.bench.handoff.mixed import Measure, MixedArm, p99
from ess.bench.harness.measure.streaming import streamed
from ess.bench.harness.report import Row, compare
from ess.bench.harness.text import token_ids
from ess.bench.prefill.rig import cores
from ess.errors import BadState, not_installed
from ess.models.load import EMBEDDED
from ess.models.text.tokenizer import Tokenizer

STAGES: Final = 2
DECODES: Final = 2
THREADS: Final = ("--threads", "1")
UP_S: Final = 120.0
TOLD_S: Final = 10.0
ENDED: Final = re.compile(r'^ess_handoffs_total\{how="(landed|missed)"\} (\S+)$', re.MULTILINE)


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
    if importlib.util.find_spec(router) is None:
        raise not_installed(router, extra="router")
    console.note(f"  one ess serve, {talk.requests} prompts of {talk.length:,} tokens ...")
    with started("serve", *THREADS) as (_, url):
        asyncio.run(_until_up(url))
        alone = asyncio.run(_streamed_all(talk, url))
    console.note(f"  PP{STAGES} and {DECODES} decode workers behind a router ...")
    shape = ("--pd", f"1p{DECODES}d", "--pp-size", str(STAGES), "--threads", str(1 + DECODES))
    with launched("serve", *shape, "--router", router) as (_, told):
        decodes = [each["url"] for each in told["processes"] if each["role"] == "decode"]
        asyncio.run(_until_up(told["url"]))
        before = _handoffs(decodes, 1)
        apart = asyncio.run(_streamed_all(talk, told["url"]))
        ended = _handoffs(decodes, before.total() + talk.requests) - before
    config = {
        "router": router,
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


def _handoffs(decodes: Sequence[str], count: int) -> Counter[str]:
    """The outcomes, since the start, of handoffs to decode workers, once there are `count`. A
    worker answers a request a moment before it reports the handoff."""
    deadline_s = time.monotonic() + TOLD_S
    while (ended := _ended(decodes)).total() < count and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return ended


def _ended(decodes: Sequence[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for url in decodes:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            for how, count in ENDED.findall(answer.read().decode()):
                counts[how] += int(float(count))
    return counts


async def _until_up(url: str) -> None:
    """Waits for the first answer, to a prompt that is not one of those measured."""
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
