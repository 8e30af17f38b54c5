"""The life of a server: listen, load, serve, drain, end.

    listen --> starting --Ready--> ready --SIGTERM--> draining --> ended (0)
                  |                  |                    |
                  `------ engine lost: streams end with an error, /health fails ---> ended (1)

The listener is open in every state but the last: while the model loads and while the server drains
a probe meets 503, never a refused connection. uvicorn would close it at the first signal, so
signals are ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn

from ess import console
from ess.clock import Clock
from ess.errors import EssError
from ess.server.commands.settings import Settings
from ess.server.process.child import Child
from ess.server.process.fronts import Fronts
from ess.server.process.link import EngineLink
from ess.server.process.service import Service

FLUSH_S: Final = 2.0
TELL_EVERY_S: Final = 0.25
ENGINE_STOP_S: Final = 10.0


class QuietServer(uvicorn.Server):
    """Leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def let_out(server: uvicorn.Server, clock: Clock) -> None:
    """The last events leave, as far as readers take them."""
    deadline_s = clock.now_s() + FLUSH_S
    while server.server_state.tasks and clock.now_s() < deadline_s:
        await asyncio.sleep(0.02)


async def tell(service: Service) -> None:
    """The server's other processes learn what this one counts."""
    assert service.shelf is not None, "a process of several has a shelf"
    await service.link.became_ready.wait()
    while True:
        service.shelf.put(service.tally)
        await asyncio.sleep(TELL_EVERY_S)


async def settled(service: Service) -> None:
    """What is loaded now stays: no garbage collection need walk it while streams wait."""
    await service.link.became_ready.wait()
    gc.collect()
    gc.freeze()


class Running:
    """Owns the listener, the engine process and the order in which they end."""

    def __init__(
        self,
        service: Service,
        server: uvicorn.Server,
        child: Child,
        fronts: Fronts,
        *,
        settings: Settings,
        clock: Clock,
    ) -> None:
        self._service = service
        self._server = server
        self._child = child
        self._fronts = fronts
        self._settings = settings
        self._clock = clock
        self._began_s = clock.now_s()
        self._signals = 0
        self._draining: asyncio.Task[None] | None = None

    @property
    def _link(self) -> EngineLink:
        return self._service.link

    async def run(self, listener: socket.socket) -> int:
        """0 if it was asked to end, 1 if the engine was lost."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        watching = [
            asyncio.ensure_future(task)
            for task in (self._hear(), self._watch_child(), self._watch_dog(), self._greet())
        ]
        if self._service.shelf is not None:
            watching.append(asyncio.ensure_future(tell(self._service)))
        self._fronts.start()
        try:
            await self._server.serve(sockets=[listener])
            return 1 if self._link.state == "lost" and not self._service.draining else 0
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            self._link.stop()
            await asyncio.gather(
                self._child.stop(within_s=ENGINE_STOP_S), self._fronts.stop(within_s=FLUSH_S)
            )

    # ---- the ends

    def _on_signal(self, number: int) -> None:
        """The first signal drains, the second ends the server at once."""
        self._signals += 1
        if self._signals == 1:
            self._service.draining = True
            grace_s = self._settings.drain_grace_s if number == signal.SIGTERM else 0.0
            self._draining = asyncio.ensure_future(self._drain(grace_s))
        else:
            self._server.should_exit = self._server.force_exit = True

    async def _drain(self, grace_s: float) -> None:
        """Streams finish; after `drain_s` the rest end with an error."""
        began_s = self._clock.now_s()
        self._fronts.drain()
        console.note(f"ess: draining, {self._service.open_count} requests are open")
        while (passed_s := self._clock.now_s() - began_s) < self._settings.drain_s:
            if self._service.open_count == 0 and passed_s >= grace_s:
                break
            await asyncio.sleep(0.05)
        if self._service.open_count:
            left = self._service.open_count
            console.note(f"ess: {left} requests did not end in time and are aborted")
        self._fronts.end("the server is shutting down")
        self._link.lose("the server is shutting down")
        await let_out(self._server, self._clock)
        self._server.should_exit = True

    async def _hear(self) -> None:
        """A message that we cannot read is an engine that we cannot use."""
        try:
            await self._link.run()
        except EssError as error:
            self._child.kill()
            await self._give_up(str(error))

    async def _watch_child(self) -> None:
        how = await self._child.ended()
        if not self._service.draining:
            await self._give_up(how)

    async def _watch_dog(self) -> None:
        """A stuck engine does not end by itself; it is known by its silence."""
        limit_s = self._settings.watchdog_s
        while True:
            await asyncio.sleep(min(1.0, limit_s / 4))
            silent_s = self._clock.now_s() - self._link.heard_at_s
            if self._link.state == "ready" and silent_s > limit_s:
                self._child.kill()
                await self._give_up(f"it has sent nothing for {silent_s:.1f} s")

    async def _give_up(self, how: str) -> None:
        self._fronts.end(how)
        self._link.lose(how)
        console.note(f"ess: the engine is gone: {self._link.why_lost}")
        if self._link.ready is not None:
            await let_out(self._server, self._clock)
            await asyncio.sleep(FLUSH_S)
        self._server.should_exit = True

    async def _greet(self) -> None:
        await settled(self._service)
        if self._link.ready is not None:
            took = f"after {self._clock.now_s() - self._began_s:.1f} s"
            console.note(f"ess: ready {took}, {self._link.ready.load_s:.1f} s of them loading")
