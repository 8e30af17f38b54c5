"""The life of a server: listen, load, serve, drain, end.

    listen --> starting --Ready--> ready --SIGTERM--> draining --> ended (0)
                  |                 |  ^                  |
                  |     engine lost |  | Ready            | engine lost: the rest end with an error
                  |                 v  |                  v
                  `-----------> restarting --SIGTERM--> ended (0)
                                    |
                                    `-- lost too often --> ended (1)

The server outlives its engine: `engines.succession` replaces a lost one, and requests fail
meanwhile, each with a sentence that says how the engine was lost. The server gives up where that
does not help: after `--engine-restarts` losses within ten minutes, or if the first engine ended by
itself while it loaded.

The listener is open in every state but the last: while a model loads and while the server drains a
probe gets 503, never a refused connection. uvicorn would close it at the first signal, so signals
come here (`signals`).

A drain ends a pause. Requests of a paused server get no token, so without that they would wait for
`--drain-s` and fail; and what they get is what they would have got without a pause.

The end comes whatever hangs. As it begins, two timers start that need neither the event loop nor
the interpreter: the first prints where every thread stands, the second is the kernel's SIGALRM.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

import uvicorn

from ess import console
from ess.clock import Clock
from ess.engine.process.lifeline import keep_objects
from ess.errors import EssError
from ess.server.commands.start.settings import Settings
from ess.server.process.engines.succession import Succession, requests_are
from ess.server.process.fronts import Fronts
from ess.server.process.link import EngineLink
from ess.server.process.logs.refusal_notes import note_refusals
from ess.server.process.pair.registration import Registration
from ess.server.process.service import Service
from ess.server.process.signals import HANG_S, Signals, limit_end
from ess.units import counted

FLUSH_S: Final = 2.0
LAST_READ_S: Final = 4.0
FRONT_STOP_S: Final = LAST_READ_S + 1.0
"""Another process of the server may wait LAST_READ_S for its own clients before it ends."""
TELL_EVERY_S: Final = 0.25
ENGINE_STOP_S: Final = 3.0
LOOK_S: Final = 0.05
READY: Final = ("/ready", 200)
HEARD_S: Final = 0.5
"""By then all processes of the server have heard of a drain, the engine has their requests, and
their counts of documents to be made have been written."""


class QuietServer(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def let_out(server: uvicorn.Server, clock: Clock) -> None:
    """Sends the last events. A client that has not read them after LAST_READ_S is cut off: uvicorn
    would cancel what waits for it, and report that as a fault of ours."""
    state, deadline_s = server.server_state, clock.now_s() + LAST_READ_S
    while state.tasks and clock.now_s() < deadline_s:
        await asyncio.sleep(0.02)
    if state.tasks:
        for connection in list(state.connections):
            if connection.transport.get_write_buffer_size():
                connection.transport.abort()


async def refresh_files(server: uvicorn.Server) -> None:
    """Reads files of keys and certificates that have changed, as uvicorn does every few seconds,
    first when it has started: a server that has not can use no certificate yet."""
    if server.config.callback_notify is not None and server.started:
        await server.config.callback_notify()


async def tell(service: Service) -> None:
    """Sends the server's other processes the counts of this one."""
    assert service.shelf is not None, "a process of several has a shelf"
    await service.link.engine.until_ready()
    while True:
        with contextlib.suppress(OSError):  # a full disk may have room again
            service.shelf.put(service.tally)
        await asyncio.sleep(TELL_EVERY_S)


async def settled(service: Service) -> None:
    """Hides loaded objects from the garbage collector, which would walk through them in streams."""
    await service.link.engine.until_ready()
    keep_objects()


async def keep_meeting(service: Service) -> None:
    """Keeps a decode worker connected to its prefill workers, in each process of the server."""
    if service.split.peers is not None:
        await service.split.peers.run()


class Running:
    """Owns the listener, the engine, and the order in which they end."""

    def __init__(
        self,
        service: Service,
        server: uvicorn.Server,
        engines: Succession,
        fronts: Fronts,
        *,
        settings: Settings,
        clock: Clock,
    ) -> None:
        self._service = service
        self._server = server
        self._engines = engines
        self._fronts = fronts
        self._settings = settings
        self._clock = clock
        self.registration: Registration | None = None
        self._is_told_to_end = False
        self._busy_s = 0.0
        self._draining: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop

    @property
    def _link(self) -> EngineLink:
        return self._service.link

    async def run(self, listeners: list[socket.socket], signals: Signals) -> int:
        """Returns 0 if it was asked to end, 1 if the engine was lost."""
        self._loop = asyncio.get_running_loop()
        signals.hear(self._on_signal)
        watching = [
            asyncio.ensure_future(task)
            for task in (
                self._keep_engine(),
                settled(self._service),
                keep_meeting(self._service),
                self._register(),
                note_refusals(self._service),
            )
        ]
        if self._service.shelf is not None:
            watching.append(asyncio.ensure_future(tell(self._service)))
        self._fronts.start()
        began_s = self._clock.now_s()
        console.note("ess: the engine starts and loads; requests get 503 until it is ready ...")
        try:
            await self._server.serve(sockets=listeners)
            return 1 if self._link.engine.state == "lost" and not self._service.draining else 0
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
            await asyncio.gather(self._end_engine(), self._fronts.stop(within_s=FRONT_STOP_S))
            # A document under way is waited for while timers of the end run: the interpreter's own
            # wait for its thread comes when they are gone.
            await asyncio.to_thread(self._service.documents.shutdown, cancel_futures=True)
            if self._service.draining:  # else the reason why the engine is lost is the last line
                self._note_end(self._clock.now_s() - began_s)

    def _note_end(self, seconds: float) -> None:
        count = sum(self._service.tally_of_all.finishes.values())
        console.note(f"ess: ended after {lasted(seconds)}, {counted(count, 'answer')}")

    # ---- the ends

    def _on_signal(self, number: int) -> None:
        """The first signal drains. SIGINT behind it, as of a second Ctrl-C, ends the server at
        once. SIGTERM behind it says nothing new: systemd and Slurm send it to all processes of a
        service, and the command that started this server passes it on. On a terminal, which could
        be closed, SIGHUP does what SIGINT does; elsewhere it asks to read files again.

        The event loop may be stuck: the timer is set here, and the loop is only told.
        """
        if number == signal.SIGHUP and not os.isatty(0):
            self._tell(self._reread)
            return
        if not self._is_told_to_end:
            self._is_told_to_end = True
            limit_end(self._settings.drain_s + HANG_S)
            self._tell(self._begin_drain, number)
        elif number != signal.SIGTERM:
            limit_end(HANG_S)
            self._server.should_exit = self._server.force_exit = True
            self._tell(self._end_at_once, signal.Signals(number).name)

    @property
    def _is_probed(self) -> bool:
        """Whether anything sends requests here because this server is ready: a probe has got 200 of
        `/ready`, or a router lists this server. Then requests still come until the next probe, and
        it is better to answer them than to refuse their connections. A probe of long ago counts
        too: how often probes come is not known."""
        asked = self._service.tally_of_all.answers
        return self.registration is not None or bool(asked.get(READY))

    def _reread(self) -> None:
        self._reading = asyncio.ensure_future(refresh_files(self._server))
        self._fronts.refresh()

    def _tell(self, act: Callable[..., None], *given: object) -> None:
        """Passes it to the event loop, unless the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act, *given)

    def _begin_drain(self, number: int) -> None:
        """After SIGTERM probes see 503 for a while before the listener closes."""
        self._service.draining = True
        self._engines.end()
        has_grace = number == signal.SIGTERM and self._engines.was_ready and self._is_probed
        work = self._drain(self._settings.drain_grace_s if has_grace else 0.0)
        self._draining = asyncio.ensure_future(self._to_the_end(work))

    def _end_at_once(self, told_by: str) -> None:
        if open_count := self._service.unanswered_by_all_count:
            left = requests_are(open_count)
            console.note(f"ess: {told_by} while the server drains: {left} open, and ended now")
        self._lose(f"the server was told by {told_by} to end at once")
        self._engines.kill()

    async def _to_the_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Does the work, then ends the server and its engine, even if the work has failed."""
        try:
            await work
        finally:
            self._server.should_exit = True
            await self._end_engine()

    async def _end_engine(self) -> None:
        """Ends the engine; one that shares experts waits for the other ranks' streams."""
        others_s = self._settings.drain_s if self._settings.dp_size > 1 else 0.0
        await self._engines.stop(within_s=max(others_s, ENGINE_STOP_S))

    async def _drain(self, grace_s: float) -> None:
        """Lets streams finish; after `drain_s` the rest end with an error."""
        began_s = self._busy_s = self._clock.now_s()
        self._fronts.drain()
        leaving, unpausing = (asyncio.ensure_future(t) for t in (self._leave(), self._unpause()))
        within = f"; {self._settings.drain_s:g} s are left, SIGINT ends all at once"
        open_count = self._service.unanswered_by_all_count
        console.note(f"ess: draining, {requests_are(open_count)} open{within * (open_count > 0)}")
        while (passed_s := self._clock.now_s() - began_s) < self._settings.drain_s:
            if self._is_done() and passed_s >= grace_s:
                break
            await asyncio.sleep(LOOK_S)
        unpausing.cancel()
        if open_count := self._service.unanswered_by_all_count:
            left = requests_are(open_count)
            console.note(f"ess: {left} still open after {self._settings.drain_s:g} s: ended now")
        await leaving
        self._lose("the server is shutting down")
        await let_out(self._server, self._clock)

    def _is_done(self) -> bool:
        """Whether no request is open. Those of other processes are counted by the engine, in a
        status that may be older than a request that they let in before they heard of the drain, and
        their documents by themselves, a moment after the engine has forgotten the request."""
        now_s = self._clock.now_s()
        if self._service.unanswered_by_all_count:
            self._busy_s = now_s
            return False
        heard_s = self._service.board.published_s if self._link.engine.state == "ready" else now_s
        return self._link.place.count == 1 or heard_s - self._busy_s > HEARD_S

    async def _unpause(self) -> None:
        """Ends every pause that keeps requests from their end, also one that another process of
        the server let in before it heard of the drain."""
        while True:
            engine = self._link.engine
            if engine.is_held and engine.state == "ready" and self._service.open_count:
                console.note("ess: generation was paused; it goes on, so that requests can finish")
                with contextlib.suppress(EssError):
                    await self._link.hold(is_on=False)
            await asyncio.sleep(LOOK_S)

    def _lose(self, sentence: str) -> None:
        self._fronts.end(sentence)
        self._link.lose(sentence)

    async def _keep_engine(self) -> None:
        try:
            sentence = await self._engines.run()
        except Exception as error:  # no other engine would start, and no client would get an answer
            sentence = f"the engine is gone, and no other starts: {type(error).__name__}: {error}"
        if not self._service.draining:
            await self._give_up(sentence)
        elif self._link.engine.state != "lost":
            self._lose(sentence)

    async def _give_up(self, sentence: str) -> None:
        limit_end(LAST_READ_S + FLUSH_S + HANG_S)
        await self._to_the_end(self._say_lost(sentence))

    async def _say_lost(self, sentence: str) -> None:
        self._lose(sentence)
        console.note(f"ess: {sentence}")
        if self._engines.was_ready:
            await let_out(self._server, self._clock)
            await asyncio.sleep(FLUSH_S)

    async def _register(self) -> None:
        if self.registration is not None and await self._link.engine.until_ready() is not None:
            await self.registration.run()

    async def _leave(self) -> None:
        if self.registration is not None:
            await self.registration.leave()


def lasted(seconds: float) -> str:
    """
    >>> lasted(42.3), lasted(600), lasted(90_000)
    ('42 s', '10 min', '25 h')
    """
    unit, size = next(
        (u, n) for u, n in (("h", 3600), ("min", 60), ("s", 1)) if seconds >= 2 * n or n == 1
    )
    return f"{seconds / size:.0f} {unit}"
