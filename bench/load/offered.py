"""Offers requests to a server at their times, and keeps what their clients saw.

Arrivals do not wait for answers: a server that falls behind meets its queue, as with users.
`at_most` closes the loop: a request that is due waits in the client until another has ended. Times
of a request count from when it was sent; `late_s` says how long after its time that was, so waiting
in the client, or a client that is too slow for its load, shows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ess.bench.harness.measure.streaming import TimedAnswer, streamed
from ess.bench.load.prompts import LoadRequest
from ess.errors import BadState, reason_of


@dataclass(frozen=True, slots=True)
class Target:
    """A server, the model to ask for, and the key it wants."""

    url: str
    model: str
    key: str = ""


@dataclass(slots=True)
class OfferedLoad:
    """`seen` are the answered requests, `sent_s` when each was sent after the beginning."""

    seen: list[TimedAnswer] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def count(self) -> int:
        return len(self.seen) + len(self.failures)


async def offer(
    target: Target, asked: Sequence[LoadRequest], *, at_most: int | None = None
) -> OfferedLoad:
    loop, offered = asyncio.get_running_loop(), OfferedLoad()
    room = contextlib.nullcontext() if at_most is None else asyncio.Semaphore(at_most)
    begun_s = loop.time()

    async def one(ask: LoadRequest) -> None:
        due_s = begun_s + ask.at_s
        if due_s > loop.time():
            await asyncio.sleep(due_s - loop.time())
        async with room:
            sent_s = loop.time()
            offered.late_s.append(sent_s - due_s)
            try:
                seen = await streamed(target.url, body_of(target, ask), key=target.key)
                if not seen.events_s:
                    raise BadState("the stream ended without a token")
            except (BadState, OSError, ValueError) as error:
                offered.failures.append(reason_of(error))
                return
            offered.seen.append(seen)
            offered.sent_s.append(sent_s - begun_s)

    await asyncio.gather(*map(one, asked))
    offered.took_s = loop.time() - begun_s
    if not offered.seen:
        raise BadState(
            f"{target.url}: all {offered.count} requests failed, first: {offered.failures[0]}"
        )
    return offered


def body_of(target: Target, ask: LoadRequest) -> dict[str, Any]:
    """Greedy, and as long as was asked for: an answer that may end early measures its model."""
    return {
        "model": target.model,
        "prompt": ask.prompt,
        "max_tokens": ask.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
