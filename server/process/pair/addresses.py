"""Addresses of other workers: the names that a router uses, and where to dial."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

import msgspec

from ess.errors import BadInput

PEERS_MAX: Final = 256
HOST_CHARS_MAX: Final = 255
AUTHORITY: Final = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,255}):([0-9]{1,5})")


class Address(msgspec.Struct, frozen=True):
    """
    >>> str(Address("10.0.0.1", 8998)), str(Address("::1", 8998))
    ('10.0.0.1:8998', '[::1]:8998')
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class NamedWorker(msgspec.Struct, frozen=True):
    """A worker's name for the router, and the address to dial."""

    name: Address
    at: Address


def address_of(host: str, port: int) -> Address:
    """The address, however a router writes the host; nothing is looked up.

    >>> address_of("[::1]", 80) == address_of("::1", 80), address_of("Prefill-0.", 80).host
    (True, 'prefill-0.')
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    return Address(bare.lower(), port)


def read_address(text: str, *, where: str) -> Address:
    """Reads HOST:PORT and nothing else: no scheme, no user, no path."""
    parts = AUTHORITY.fullmatch(text)
    if parts is None or not 0 < int(parts[2]) <= 65535:
        raise BadInput(f"{where} has {text!r:.100}, not HOST:PORT such as 10.0.0.1:8998")
    return address_of(parts[1], int(parts[2]))


def read_peers(text: str) -> tuple[NamedWorker, ...]:
    """Reads `HOST:PORT,...`; NAME:PORT=HOST:PORT where the router's name is not the address to
    dial.

    >>> [str(peer.at) for peer in read_peers("a:1, b:2=[::1]:3")]
    ['a:1', '[::1]:3']
    """
    peers: dict[Address, NamedWorker] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, _, at = item.partition("=")
        called = read_address(name, where="peers")
        if called in peers:
            raise BadInput(f"peers has {called} twice")
        peers[called] = NamedWorker(called, read_address(at, where="peers") if at else called)
    if len(peers) > PEERS_MAX:
        raise BadInput(f"peers has {len(peers):,} addresses; at most {PEERS_MAX} are met")
    return tuple(peers.values())


def check_router(url: str) -> None:
    """Refuses a bad address of a router; the error omits a name and password in it."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme == "http" and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits or parts.username is not None or parts.query or parts.fragment:
        raise BadInput(f"register is {url.rpartition('@')[2]!r:.100}; write http://HOST:PORT")
