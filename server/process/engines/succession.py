"""The server's engine: started, watched, and started again when it is lost.

An engine is lost when one of its processes ends or cannot be started, when it reports a Fault,
when a message of it cannot be read, and when it is silent: for `watchdog_s` once loaded; while it
loads, if it has been stopped for as long. Then, in this order, in each of the server's processes:

    all open requests end with a sentence, or wait to go on, and new ones are refused with it
    all processes of the engine are killed, and have ended
    another engine starts, at another endpoint, unless there were too many; there is a pause
        before it if the lost engine has answered no request

So two engines never share memory or ports, and the second never gets a message for the first. The
listener, the connections and the counts of the server stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from ess import console
from ess.clock import Clock
from ess.errors import reason_of
from ess.server.process.engines.group import LOOK_S, SEEN_S, EngineGroup, Loss
from ess.server.process.engines.restarts import Restarts
from ess.server.process.fronts import Fronts, endpoint_of
from ess.server.process.link import EngineLink

LAST_WORDS_S: Final = 1.0


def requests_are(count: int) -> str:
    """
    >>> requests_are(1), requests_are(2000)
    ('1 request is', '2,000 requests are')
    """
    return "1 request is" if count == 1 else f"{count:,} requests are"


def _advice(loss: Loss) -> str:
    """What to look at, as the end of a sentence."""
    if signal.SIGKILL.name not in loss.how:
        return ""
    return "; unless somebody killed it, memory ran out, and the kernel's log (dmesg) says so"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """How engine number n is started; its front f connects at `endpoint_of(folder, f, n)`. A
    process that a signal has stopped for `stopped_s` is lost."""

    folder: str
    start: Callable[[int], Awaitable[EngineGroup]]
    watchdog_s: float
    stopped_s: float
    restarts: Restarts


class Succession:
    def __init__(self, start: EngineStart, link: EngineLink, fronts: Fronts, clock: Clock) -> None:
        self._given = start
        self._link = link
        self._fronts = fronts
        self._clock = clock
        self._number = 0
        self._group: EngineGroup | None = None
        self._lost: asyncio.Future[Loss]
        self._ends = asyncio.Event()
        self.was_ready = False

    def end(self) -> None:
        """From now on a lost engine is not replaced."""
        self._ends.set()

    def kill(self) -> None:
        if self._group is not None:
            self._group.kill()

    async def stop(self, *, within_s: float) -> None:
        self.end()
        self._link.stop()
        if self._group is not None:
            await self._group.stop(within_s=within_s)

    async def run(self) -> str:
        """Runs engines until one is lost and not replaced; returns how that one was lost."""
        while True:
            loss = await self._run_one()
            sentence = f"the engine is gone: {loss.how}"
            if self._ends.is_set():
                return sentence
            if why_not := self._given.restarts.why_not(loss, was_ready=self.was_ready):
                sentence += why_not
                await self._end_lost(loss, sentence)
                return sentence
            await self._succeed(loss, sentence)

    async def _succeed(self, loss: Loss, sentence: str) -> None:
        restarts = self._given.restarts
        was_of_use = self._group is not None and self._link.engine.has_answered
        pause_s = restarts.add(was_of_use=was_of_use)
        self._number += 1
        starts = f"another starts in {pause_s:g} s" if pause_s else "another starts"
        count = self._open_count() if loss.open_count is None else loss.open_count
        console.note(
            f"ess: {sentence}; {starts} ({restarts.count} of {restarts.most});"
            f" {requests_are(count)} open{_advice(loss)}"
        )
        sentence += f"; {starts}" if pause_s else ""
        self._fronts.succeed(self._number, sentence)
        await self._end_lost(loss, sentence)
        await self._pause(pause_s)

    def _open_count(self) -> int:
        return self._link.open_count + self._link.open_elsewhere_count

    async def _pause(self, pause_s: float) -> None:
        """Waits; the server's end cuts it short."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ends.wait(), pause_s)

    async def _end_lost(self, loss: Loss, sentence: str) -> None:
        """Ends what is left of the lost engine. An engine that reported its end first has a moment
        to log the reason."""
        self._link.interrupt(sentence)
        if self._group is not None:
            await self._group.stop(within_s=LAST_WORDS_S if loss.is_said else 0.0)

    async def _run_one(self) -> Loss:
        """Runs one engine until it is lost; its processes may still be there."""
        self._lost = asyncio.get_running_loop().create_future()
        self._link.on_fault = self._on_fault
        self._group = None
        if self._ends.is_set():
            return Loss("the server ends")
        try:
            self._listen()
            self._group = group = await self._given.start(self._number)
        except OSError as error:  # too many processes or files, too little memory: for now
            return Loss(f"it cannot be started: {reason_of(error)}")
        tasks = [
            asyncio.ensure_future(task)
            for task in (self._hear(), self._watch(group), self._watch_silence(), self._greet())
        ]
        try:
            return await group.cause(await self._lost)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _listen(self) -> None:
        """Each engine has an endpoint of its own; the first one's is there from the beginning."""
        if self._number:
            self._link.renew(endpoint_of(self._given.folder, self._link.place.front, self._number))

    def _on_fault(self, sentence: str) -> None:
        self._lose(Loss(sentence, is_said=True, open_count=self._open_count()))

    def _lose(self, loss: Loss) -> None:
        """Only the first report counts: all others about a lost engine follow from that."""
        if not self._lost.done():
            self._lost.set_result(loss)

    async def _greet(self) -> None:
        began_s, word = self._clock.now_s(), "ready again" if self.was_ready else "ready"
        if (ready := await self._link.engine.until_ready()) is not None:
            self.was_ready = True
            took = f"after {self._clock.now_s() - began_s:.1f} s"
            console.note(
                f"ess: {word} {took}, {ready.load_s:.1f} s of them loading{self._resumed_text()}"
            )

    def _resumed_text(self) -> str:
        """How many requests were sent again, as the end of a sentence."""
        count = self._link.going_on_count
        return f"; {count:,} of the lost engine's requests go on" if count else ""

    async def _hear(self) -> None:
        """Receives messages; an engine whose message cannot be read cannot be used."""
        try:
            await self._link.run()
        except Exception as error:
            self._lose(Loss(f"what it said cannot be read: {error}", is_said=True))

    async def _watch(self, group: EngineGroup) -> None:
        """A process that ends with a code may have said why in a message that is yet to be read."""
        loss = await group.lost(stopped_s=self._given.stopped_s)
        if loss.is_said and not self._ends.is_set():
            await asyncio.wait([self._lost], timeout=SEEN_S)
        self._lose(loss)

    async def _watch_silence(self) -> None:
        """Looks for silence: a stuck engine does not end by itself."""
        limit_s = self._given.watchdog_s
        while True:
            await asyncio.sleep(min(LOOK_S, limit_s / 4))
            engine = self._link.engine
            if engine.state == "ready" and (silent_s := engine.silent_s) > limit_s:
                self._lose(Loss(f"it has sent nothing for {silent_s:.1f} s"))
