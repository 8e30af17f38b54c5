"""The server's socket to the engine process: one endpoint for each engine."""

from __future__ import annotations

import asyncio
from typing import cast

import zmq
import zmq.asyncio

from ess.engine.process.messages import FromEngine, Packer, ToEngine
from ess.engine.process.wire import UNREAD_MAX
from ess.server.http.responses import Interrupted


class EngineSocket:
    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self.packer = Packer()
        self._context = context
        self._socket = self._bound(endpoint)

    def send(self, message: ToEngine) -> bytes:
        """Sends a message, and returns its bytes. The queue is unbounded, so this never waits;
        without a peer there is no queue."""
        packed = self.packer.pack(message)
        sent = cast("asyncio.Future[None]", self._socket.send(packed, zmq.NOBLOCK))
        if sent.done() and sent.exception() is not None:
            raise Interrupted("the engine does not listen")
        return packed

    async def receive(self) -> FromEngine:
        return self.packer.for_server(await self._socket.recv())

    def renew(self, endpoint: str) -> None:
        """Listens to another engine from now on. `receive` must not be waiting. OSError if there
        can be no socket now: then nothing has changed. The last socket is closed behind that, since
        libzmq crashes where a closed one is used."""
        fresh = self._bound(endpoint)
        self.close(linger=0)
        self._socket = fresh

    def close(self, *, linger: int | None = None) -> None:
        self._socket.close(linger=linger)

    def _bound(self, endpoint: str) -> zmq.asyncio.Socket:
        try:
            socket = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from None
        socket.setsockopt(zmq.LINGER, 200)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, UNREAD_MAX)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise OSError(error.errno, error.strerror) from None
        return socket
