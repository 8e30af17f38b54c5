"""Between machines, with nothing to install: payload in the stream, checked before it lands."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

from ess.clock import Clock
from ess.errors import BadInput, Unavailable
from ess.transfer.endpoint import Identity
from ess.transfer.transports.streams import StreamTransport

BACKLOG: Final = 128


class TcpTransport(StreamTransport):
    """Listens on `host`, an address of a private interface; loopback unless told otherwise."""

    def __init__(
        self,
        identity: Identity,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(identity, listener=_listener(host, port), clock=clock)

    def _address(self) -> bytes:
        host, port = self._listener.getsockname()[:2]
        return f"{port} {host}".encode()

    def _dial(self, address: bytes) -> socket.socket:
        """Takes numeric addresses only: resolving a name would wait for the network."""
        number, _, host = address.decode("ascii", "replace").partition(" ")
        try:
            family, port = _family(host), int(number)
        except ValueError:
            raise BadInput(f"{address[:80]!r} is not an address of a peer") from None
        if not 0 < port < 1 << 16:
            raise BadInput(f"{address[:80]!r} is not an address of a peer: the port is {port}")
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect_ex((host, port))
        return sock


def _family(host: str) -> socket.AddressFamily:
    is_six = ipaddress.ip_address(host).version == 6
    return socket.AF_INET6 if is_six else socket.AF_INET


def _listener(host: str, port: int) -> socket.socket:
    try:
        family = _family(host)
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, ValueError) as wrong:
        raise Unavailable(f"transfers cannot listen on {host} port {port}: {wrong}") from None
