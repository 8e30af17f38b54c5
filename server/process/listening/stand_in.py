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
from typing import Any, Final

import uvicorn

POLL_S: Final = 0.02


async def has_started(server: uvicorn.Server) -> None:
    """Waits until the server accepts connections."""
    while not server.started:
        await asyncio.sleep(POLL_S)


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
        """The protocol of the server's own listener."""
        made: Any = self._server.config.http_protocol_class
        return functools.partial(
            made,
            config=self._server.config,
            server_state=self._server.server_state,
            app_state=self._server.lifespan.state,
        )

    def leave(self, listener: int) -> None:
        """Accepts no more; connections already accepted are served to their end."""
        made = self._standing.pop(listener, None)
        if made is not None:
            self._server.servers.remove(made)
            made.close()
