"""The engine's end of the wire to the server process. Needs no torch."""

from __future__ import annotations

from typing import Final, Protocol

import zmq

from ess.engine.process.messages import FromEngine, Packer, Stop, ToEngine


class Wire(Protocol):
    def take(self, *, timeout_s: float) -> list[ToEngine]: ...

    def give(self, message: FromEngine) -> None: ...


UNREAD_MAX: Final = 256


class SocketWire:
    """One peer over ZMQ. `lifeline` is a descriptor that becomes readable when the peer is gone.

    A peer that reads too slowly blocks us after `UNREAD_MAX` messages; a lost peer does not.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self._packer = Packer()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, UNREAD_MAX)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, 200)
        self._socket.connect(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._lifeline: int | None = None

    def watch(self, lifeline: int) -> None:
        self._lifeline = lifeline
        self._poller.register(lifeline, zmq.POLLIN)

    def take(self, *, timeout_s: float) -> list[ToEngine]:
        ready = dict(self._poller.poll(int(timeout_s * 1000)))
        if self._lifeline is not None and self._lifeline in ready:
            return [Stop()]
        taken: list[ToEngine] = []
        while True:
            try:
                taken.append(self._packer.for_engine(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return taken

    def give(self, message: FromEngine) -> None:
        packed = self._packer.pack(message)
        while not self._is_alone():
            try:
                self._socket.send(packed)
                return
            except zmq.Again:
                continue

    def _is_alone(self) -> bool:
        lifeline = self._lifeline
        return lifeline is not None and lifeline in dict(self._poller.poll(0))

    def close(self) -> None:
        self._socket.close()
