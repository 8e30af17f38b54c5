"""Connections to a process that is not up are served by the first one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import uvicorn
from starlette.types import Receive, Scope, Send

from ess.server.process.lifecycle import QuietServer
from ess.server.process.listening.stand_in import StandIn, has_started

ANSWER_S = 60


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"here"})


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[QuietServer]:
    server = QuietServer(uvicorn.Config(app, lifespan="off", log_config=None))
    own = socket.create_server(("127.0.0.1", 0))
    running = asyncio.ensure_future(server.serve(sockets=[own]))
    await has_started(server)
    yield server
    server.should_exit = True
    await asyncio.wait_for(running, ANSWER_S)


async def answer(listener: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(ANSWER_S):
        said = await reader.read()
    writer.close()
    return said


async def is_left_alone(listener: socket.socket) -> bool:
    """Whether a connection waits for a process that accepts at the listener itself."""
    _, writer = await asyncio.open_connection(*listener.getsockname())
    taken, _ = await asyncio.wait_for(asyncio.get_running_loop().sock_accept(listener), ANSWER_S)
    taken.close()
    writer.close()
    return True


def test_the_first_process_serves_until_it_leaves():
    async def act() -> None:
        async with serving() as server:
            stand_in, missing = StandIn(server), socket.create_server(("127.0.0.1", 0))
            missing.setblocking(False)
            for _ in range(2):
                await stand_in.take(missing.fileno())
                await stand_in.take(missing.fileno())
                said = await answer(missing)
                assert said.count(b"here") == said.count(b"connection: close") == 1
                stand_in.leave(missing.fileno())
                stand_in.leave(missing.fileno())
                assert await is_left_alone(missing)
            await stand_in.take(missing.fileno())
        assert await is_left_alone(missing), "it ends with the server, and the listener stays"
        missing.close()

    asyncio.run(act())


def test_a_server_that_ends_stands_in_for_nobody():
    async def act() -> None:
        async with serving() as server:
            missing = socket.create_server(("127.0.0.1", 0))
            missing.setblocking(False)
            server.should_exit = True
            await StandIn(server).take(missing.fileno())
            assert await is_left_alone(missing)
            missing.close()

    asyncio.run(act())
