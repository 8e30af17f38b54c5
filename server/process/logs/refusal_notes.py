"""A note in the log while requests are refused: one in `EVERY_S` at most, for all of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from ess import console
from ess.server.process.service import Service

EVERY_S: Final = 10.0


async def note_refusals(service: Service, *, every_s: float = EVERY_S) -> None:
    """Also of the server's other processes, whose counts are known."""
    before = Counter(service.tally_of_all.refusals)
    while True:
        await asyncio.sleep(every_s)
        now = Counter(service.tally_of_all.refusals)
        if fresh := now - before:
            limits, open_count = service.limits, service.open_count
            console.note(
                f"ess: {words_of(fresh)} within {every_s:g} s; {open_count:,} are open, the limits"
                f" are --max-running {limits.running_max:,} and --max-waiting"
                f" {limits.waiting_max:,}"
            )
        before = now


def words_of(refusals: Counter[str]) -> str:
    """
    >>> words_of(Counter(texts=1))
    '1 request was refused (texts 1)'
    >>> words_of(Counter(texts=2, queue_full=1200))
    '1,202 requests were refused (queue_full 1,200, texts 2)'
    """
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in refusals.most_common())
    total = refusals.total()
    verb = "request was" if total == 1 else "requests were"
    return f"{total:,} {verb} refused ({reasons})"
