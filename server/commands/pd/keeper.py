"""A worker or a router as a process that is started again when it ends.

Pauses between starts grow, and processes that killed ones left end first. A program that ends
before it was ever ready is not started again: the same cause would end it again. Later,
`STARTS_MAX` such starts in a row are the last. Then `why_lost` says how it ended, with its last
lines.
"""

from __future__ import annotations

import asyncio
import collections
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec

from ess import console
from ess.clock import Clock
from ess.errors import reason_of
from ess.server.commands.pd.leashed import Program
from ess.server.commands.pd.orphans import Orphans
from ess.server.process.child import Child, End
from ess.server.process.fronts import AGAIN_MAX_S, AGAIN_S, CALM_S

LEASHED: Final = "ess.server.commands.pd.leashed"
STARTS_MAX: Final = 5
LAST_LINES: Final = 5
LAST_S: Final = 1.0
POLL_S: Final = 0.05


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The program to run. Without a `url` it takes `--port`, and first prints its URL as JSON."""

    name: str
    home: str
    words: tuple[str, ...]
    url: str = ""


class Keeper:
    """`ready` is set while the program is ready: `is_ready` is asked with its URL until it agrees.
    The program's log is passed on under its name; a router prints a banner first, so its log is
    passed on only once it is ready."""

    def __init__(
        self,
        order: Order,
        *,
        environment: Mapping[str, str],
        is_ready: Callable[[str], Awaitable[bool]],
        clock: Clock,
        orphans: Orphans,
    ) -> None:
        self.name = order.name
        self.url = order.url
        self.pid = 0
        self.why_lost = ""
        self.listens = asyncio.Event()
        self.ready = asyncio.Event()
        self._order = order
        self._environment = environment
        self._is_ready = is_ready
        self._clock = clock
        self._orphans = orphans
        self._child: Child | None = None
        self._ending = asyncio.Event()
        self._is_killed = False
        self._last_lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._keeping: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Starts it; the task is done when the program is given up or was ended."""
        self._keeping = asyncio.ensure_future(self._keep())
        return self._keeping

    async def end(self, *, within_s: float, by: signal.Signals = signal.SIGTERM) -> None:
        """Asks the program, if it runs, to end; kills it after `within_s`."""
        self._ending.set()
        if self._keeping is None:
            return
        if self._child is not None:
            self._child.ask_to_end(by)
            await asyncio.wait([self._keeping], timeout=within_s)
        if self._child is not None:
            if not self._child.has_ended:
                console.note(f"ess: {self.name} has not ended within {within_s:g} s and is killed")
                self.kill()
            await asyncio.wait([self._keeping], timeout=within_s)
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)

    def refresh(self) -> None:
        """Has a server read files that may have changed."""
        if self._child is not None:
            self._child.hang_up()

    def start_no_more(self) -> None:
        """What ends from now on, as of a signal to all processes, is not started again."""
        self._ending.set()

    def retire(self) -> None:
        """Asks the program to end in its own time, and does not start it again."""
        self._ending.set()
        if self._child is not None:
            self._child.ask_to_end(signal.SIGTERM)

    def kill(self) -> None:
        self._ending.set()
        self._is_killed = True
        if self._child is not None:
            self._child.kill()

    async def _keep(self) -> None:
        failed_count, wait_s = STARTS_MAX - 1, AGAIN_S
        while not self._ending.is_set():
            began_s = self._clock.now_s()
            end = await self._run_program()
            sentence = f"{self.name} is gone: {end.how}{self._last_words()}"
            if self._ending.is_set():
                if not (end.is_quiet or self._is_killed):
                    console.note(f"ess: {sentence}")
                return
            failed_count = 0 if self.ready.is_set() else failed_count + 1
            self.ready.clear()
            if failed_count == STARTS_MAX:
                self.why_lost = sentence
                return
            wait_s = AGAIN_S if self._clock.now_s() - began_s > CALM_S else wait_s
            console.note(f"ess: {sentence}\ness: {self.name} starts again in {wait_s:g} s")
            await asyncio.sleep(wait_s)
            await self._orphans.gone(self.name)
            wait_s = min(2 * wait_s, AGAIN_MAX_S)

    async def _run_program(self) -> End:
        """Runs the program from start to end, and says how it ended."""
        self._last_lines.clear()
        self.listens.clear()
        program = Program(home=self._order.home, words=self._words(), parent=os.getpid())
        try:
            child = self._child = await self._orphans.started(
                Child.start(LEASHED, program, environment=self._environment, is_heard=True)
            )
        except OSError as error:
            return End(f"it cannot be started: {reason_of(error)}", is_by_code=False)
        self.pid = child.pid
        hearing = [
            asyncio.ensure_future(heard)
            for heard in (self._pass_on(child.logged()), self._read(child.printed()))
        ]
        watching = asyncio.ensure_future(self._watch())
        try:
            end = await child.ended()
            await asyncio.wait(hearing, timeout=LAST_S)
            return end
        finally:
            self._child = None
            self._orphans.forget(child)
            for task in (*hearing, watching):
                task.cancel()
            await asyncio.gather(*hearing, watching, return_exceptions=True)

    def _words(self) -> tuple[str, ...]:
        """The command line; a restarted program keeps its address, by which routers know it."""
        if self._order.url:
            return self._order.words
        port = self.url.rpartition(":")[2] or "0"
        return (*self._order.words, "--port", port)

    async def _read(self, printed: AsyncIterator[str]) -> None:
        if not self._order.url:
            self.url = (await document(printed))["url"]
            console.note(f"ess: {self.name} listens at {self.url}, process {self.pid}")
        self.listens.set()
        await self._pass_on(printed)

    async def _pass_on(self, lines: AsyncIterator[str]) -> None:
        async for line in lines:
            self._last_lines.append(line)
            if not self._order.url or self.ready.is_set():
                console.note(f"{self.name}: {line}")

    async def _watch(self) -> None:
        await self.listens.wait()
        while not await self._is_ready(self.url):
            await asyncio.sleep(POLL_S)
        self.ready.set()

    def _last_words(self) -> str:
        return "".join(f"\n    {line}" for line in self._last_lines)


async def document(lines: AsyncIterator[str]) -> dict[str, Any]:
    """The first JSON document that the program prints; its last line is a brace."""
    text = ""
    async for line in lines:
        text += line
        if line == "}":
            break
    printed: dict[str, Any] = msgspec.json.decode(text or "{}")
    return printed
