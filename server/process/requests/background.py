"""Responses that are made while no client waits for them: a task for each, by owner and id."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from ess.errors import BadInput


class Background:
    def __init__(self) -> None:
        self._tasks: dict[tuple[bytes, str], asyncio.Task[None]] = {}

    def check(self, owner: bytes, identity: str) -> None:
        """Refuses an id, which clients may choose, of a response that is still being made."""
        if (owner, identity) in self._tasks:
            raise BadInput(f"request_id: the response {identity!r:.80} is being made already")

    def start(self, owner: bytes, identity: str, work: Coroutine[None, None, None]) -> None:
        key = owner, identity
        self._tasks[key] = asyncio.ensure_future(work)
        self._tasks[key].add_done_callback(lambda task: self._tasks.pop(key))

    async def cancel(self, owner: bytes, identity: str) -> bool:
        """Ends the making of the response; returns whether it was still being made."""
        task = self._tasks.get((owner, identity))
        if task is None:
            return False
        await asyncio.sleep(0)  # a task cancelled before its first step would do nothing
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return True
