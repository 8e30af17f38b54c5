"""A further process of the server: HTTP on one side, the shared engine on the other.

    python -m ess.server.commands.start.front            (a Start as one JSON line on stdin)

The first process reads the settings and starts the engine. On this process's stdin it says when to
drain, when to end, when files may have changed, and the endpoint of an engine that replaces a lost
one; when stdin closes, the first process is gone. Only the first process handles signals.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import msgspec
import uvicorn

from ess import console
from ess.clock import Clock, RealClock
from ess.engine.process.lifeline import die_with_parent, leave_signals_to_parent
from ess.errors import EssError
from ess.server.commands.start.files.words import read_words
from ess.server.commands.start.http_config import uvicorn_config
from ess.server.commands.start.launch import engine_link, recovery_of
from ess.server.commands.start.server_facts import ServerFacts, make_service
from ess.server.http import telemetry
from ess.server.process.board import Board
from ess.server.process.fronts import Start, endpoint_of
from ess.server.process.lifecycle import (
    QuietServer,
    keep_meeting,
    let_out,
    refresh_files,
    settled,
    tell,
)
from ess.server.process.listening.stand_in import has_started
from ess.server.process.requests.open_calls import FrontPlace
from ess.server.process.service import Service
from ess.server.process.tally import Shelf
from ess.server.process.whole_run import run_whole


class Front:
    def __init__(
        self, service: Service, server: uvicorn.Server, clock: Clock, *, folder: str
    ) -> None:
        self._folder = folder
        self._service = service
        self._server = server
        self._clock = clock

    async def run(self, listener: socket.socket, orders: asyncio.StreamReader, *, up: int) -> None:
        self._hearing = asyncio.ensure_future(self._hear())
        watching = [
            asyncio.ensure_future(task)
            for task in (
                self._obey(orders),
                self._say_up(up),
                tell(self._service),
                settled(self._service),
                keep_meeting(self._service),
            )
        ]
        try:
            await self._serve(listener)
        finally:
            for task in (self._hearing, *watching):
                task.cancel()
            await asyncio.gather(self._hearing, *watching, return_exceptions=True)

    async def _serve(self, listener: socket.socket) -> None:
        """Accepts connections once the engine has said that it is ready. A front that replaces
        another would refuse requests until then, while the first process, which accepts for it,
        serves them."""
        if await self._service.link.engine.until_ready() is not None:
            await self._server.serve(sockets=[listener])

    async def _say_up(self, up: int) -> None:
        await has_started(self._server)
        os.write(up, b"!")
        os.close(up)

    async def _hear(self) -> None:
        try:
            await self._service.link.run()
        except EssError as error:
            await self._end(str(error))

    async def _obey(self, orders: asyncio.StreamReader) -> None:
        """One that cannot obey ends, and another takes its place: it would hear of no further
        engine, nor of the server's end."""
        sentence = "the server has ended"
        try:
            while line := (await orders.readline()).decode().strip():
                await self._act(*line.split(" ", 1))
        except Exception as error:
            sentence = f"this process of the server ends: {type(error).__name__}: {error}"
            console.note(f"ess: {sentence}")
        await self._end(sentence)

    async def _act(self, order: str, sentence: str = "") -> None:
        if order == "drain":
            self._service.draining = True
        elif order == "refresh":
            await refresh_files(self._server)
        elif order == "succeed":
            engine, _, why = sentence.partition(" ")
            await self._succeed(int(engine), why)
        else:
            await self._end(sentence)

    async def _succeed(self, engine: int, why: str) -> None:
        link = self._service.link
        link.interrupt(why)
        self._hearing.cancel()
        await asyncio.gather(self._hearing, return_exceptions=True)
        link.renew(endpoint_of(self._folder, link.place.front, engine))
        self._hearing = asyncio.ensure_future(self._hear())

    async def _end(self, sentence: str) -> None:
        self._service.link.lose(sentence)
        await let_out(self._server, self._clock)
        self._server.should_exit = True


async def serve(start: Start) -> None:
    launch = msgspec.json.decode(start.told, type=ServerFacts)
    clock = RealClock()
    board = Board(clock)
    place = FrontPlace(front=start.front, count=start.count, life=start.life)
    recovery = recovery_of(launch.resolved.settings)
    with engine_link(start.folder, board, clock, place, recovery) as link:
        words = read_words(launch.resolved.settings, launch.checkpoint)
        service = make_service(launch, words, link=link, board=board)
        service.shelf = Shelf(start.folder, count=start.count, front=start.front, life=start.life)
        settings = launch.resolved.settings
        with telemetry.provided(settings.otlp_endpoint, model=service.name) as spans:
            server = QuietServer(uvicorn_config(settings, service, spans=spans))
            listener = socket.socket(fileno=start.listener)
            async with service.texts:
                await Front(service, server, clock, folder=start.folder).run(
                    listener, await _orders(), up=start.up
                )


async def _orders() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def main() -> int:
    leave_signals_to_parent()
    die_with_parent()
    with open(0, "rb", buffering=0, closefd=False) as orders:
        start = msgspec.json.decode(orders.readline(), type=Start)
    run_whole(serve(start))
    return 0


if __name__ == "__main__":
    sys.exit(main())
