"""The part of a prefill worker that runs on another machine than its server, or beside it under
torchrun: the ranks of this process, without HTTP.

    ess prefill MODEL --pp-size 4 --nnodes 2 --node-rank 1 --dist-init-addr HOST:PORT ...

The ranks wait for the others at the address. When one of them ends, or has been stopped for
STOPPED_S, the worker has ended: the others here are killed too, and all are started for the next
worker; so they are if a process could not be started. Restarts are not counted here: the server of
rank 0 decides when to give up.

A signal that ends this process has often been sent to the server too: by Slurm, by torchrun, or
with all pods of a group. The server drains then, and its requests need the ranks here. So these go
on until rank 0 has ended, for the time of a drain at most; SIGINT ends them at once then.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Final

from ess import console
from ess.errors import reason_of
from ess.server.process.engines.group import EngineGroup, Loss

AGAIN_S: Final = 0.5
AGAIN_MAX_S: Final = 10.0
STOP_S: Final = 3.0
STOPPED_S: Final = 5.0


class Node:
    def __init__(self, start: Callable[[int], Awaitable[EngineGroup]], *, drain_s: float) -> None:
        self._start = start
        self._drain_s = drain_s
        self._end = asyncio.Event()
        self._at_once = asyncio.Event()
        self._has_lost = False

    def end(self, number: int) -> None:
        """SIGTERM may come twice, as to a server (`Lifecycle`)."""
        if self._end.is_set() and number != signal.SIGTERM:
            self._at_once.set()
        self._end.set()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for told in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(told, self.end, told)
        if not os.isatty(0):  # SIGHUP asks to read files again, and a node has none
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # the terminal is closed
            loop.add_signal_handler(signal.SIGHUP, self.end, signal.SIGHUP)
        number, wait_s = 0, AGAIN_S
        while not self._end.is_set():
            began_s = loop.time()
            loss = await self._run_one(number)
            number += 1
            if loss is not None:
                console.note(f"ess: {loss.how}; the processes of this node start again")
                wait_s = AGAIN_S if loop.time() - began_s > AGAIN_MAX_S else 2 * wait_s
                await self._unless_ended(asyncio.sleep(min(wait_s, AGAIN_MAX_S)))
        return 0

    async def _run_one(self, number: int) -> Loss | None:
        """Runs a group of processes until it is lost, or until this process is told to end. Then
        none of them is left."""
        try:
            group = await self._start(number)
        except OSError as error:  # too many processes or files, too little memory: for now
            return Loss(f"a process cannot be started: {reason_of(error)}")
        loss = await self._unless_ended(group.lost(stopped_s=STOPPED_S))
        if loss is None:
            await self._drain(group)
        self._has_lost = True
        await group.stop(within_s=STOP_S if loss is None else 0.0)
        return loss

    async def _drain(self, group: EngineGroup) -> None:
        """After a loss even processes that still load are needed, by the requests that resume."""
        console.note(
            "ess: processes that requests may need go on until the first machine has ended, for"
            f" {self._drain_s:g} s at most; SIGINT ends them at once"
        )
        if not self._has_lost:
            group.ask_to_leave()
        lost = asyncio.ensure_future(group.lost(stopped_s=STOPPED_S))
        ending = asyncio.ensure_future(self._at_once.wait())
        done, _ = await asyncio.wait(
            {lost, ending}, timeout=self._drain_s, return_when=asyncio.FIRST_COMPLETED
        )
        lost.cancel()
        ending.cancel()
        if ending in done:
            group.kill()

    async def _unless_ended(self, work: Awaitable[Loss | None]) -> Loss | None:
        """The result of the work, or None if this process is told to end first."""
        doing, ending = asyncio.ensure_future(work), asyncio.ensure_future(self._end.wait())
        await asyncio.wait({doing, ending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if doing.done():
            return doing.result()
        doing.cancel()
        return None
