"""The first process serves for another that is not up: not yet started, or gone.

The kernel divides connections among the listeners of all processes, even of those that do not
accept. A connection to a missing process's listener would wait for the next process.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import uvicorn

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLL_S: Final = 0.02


async def has_started(server: uvicorn.Server) -> None:
    """Waits until the server accepts connections."""
    while not server.started:
        await asyncio.sleep(POLL_S)


async def _serve_one(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Has uvicorn close the connection behind the answer."""

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"connection", b"close")]
            message = {**message, "headers": headers}
        await send(message)

    await app(scope, receive, send_last)


class StandIn:
    """`server` is the first process's own; its connections for others end with it."""

    def __init__(self, server: uvicorn.Server) -> None:
        self._server = server
        self._standing: dict[int, asyncio.Server] = {}

    async def take(self, listener: int) -> None:
        """Accepts at this descriptor too, until `leave`."""
        await has_started(self._server)
        if listener in self._standing or self._server.should_exit:
            return
        config, protocol = self._server.config, self._protocol()
        shared = socket.socket(fileno=os.dup(listener))
        made = await asyncio.get_running_loop().create_server(
            protocol, sock=shared, ssl=config.ssl, backlog=config.backlog
        )
        self._standing[listener] = made
        self._server.servers.append(made)

    def _protocol(self) -> Callable[[], asyncio.Protocol]:
        """The protocol of the server's own listener, but a connection serves a single request: the
        missing process may be up when its client sends the next one."""
        config, state = self._server.config, self._server.lifespan.state
        made: Any = config.http_protocol_class
        app = functools.partial(_serve_one, config.loaded_app)

        def single() -> Any:
            protocol = made(config=config, server_state=self._server.server_state, app_state=state)
            protocol.app = app
            return protocol

        return single

    def leave(self, listener: int) -> None:
        """Accepts no more; connections already accepted are served to their end."""
        made = self._standing.pop(listener, None)
        if made is not None:
            self._server.servers.remove(made)
            made.close()
