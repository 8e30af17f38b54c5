"""Addresses as operators write them, and lists of them."""

from __future__ import annotations

import ipaddress
import re
from typing import Any, Final

import msgspec

from ess.decoding import UNDECODABLE
from ess.errors import BadInput
from ess.server.http.page_addresses import ANY, PORTS

ORIGIN: Final = re.compile(r"([a-z][a-z0-9+.-]*)://(?:\[[0-9a-f:.]+\]|[^/?#@:\[\]\s]+)(:[0-9]+)?")


def listed(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def read_origins(text: str) -> tuple[str, ...]:
    """Origins with commas between them or, as vLLM has them, as a JSON list. A port that its scheme
    has anyway is left out, as browsers do.

    >>> read_origins("https://Chat.example, http://localhost:3000"), read_origins('["*"]')
    (('https://chat.example', 'http://localhost:3000'), ('*',))
    """
    try:
        given = msgspec.json.decode(text, type=list[str]) if text.startswith("[") else listed(text)
    except UNDECODABLE:
        raise BadInput(f"allowed_origins is {text!r:.80}, must be a list of texts") from None
    return tuple(_origin(origin.lower()) for origin in given)


def _origin(given: str) -> str:
    parts = ORIGIN.fullmatch(given)
    if given == ANY:
        return given
    if parts is None:
        raise BadInput(
            f"allowed_origins has {given!r:.80}, must look like https://chat.example:8443, or be *"
        )
    scheme, port = parts.groups()
    return given.removesuffix(port) if port == f":{PORTS.get(scheme)}" else given


def is_loopback(host: str) -> bool:
    """
    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "box")]
    [True, True, True, False, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_near(name: str, address: str) -> bool:
    """Whether an address of ZeroMQ is one that only this machine reaches."""
    kind, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if kind == "ipc" and rest:
        return True
    if kind != "tcp" or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadInput(f"{name} is {address!r}, must be tcp://HOST:PORT or ipc://PATH")
    return is_loopback(host.strip("[]"))


def without_login(value: Any) -> Any:
    """An address without the name and password that it may hold.

    >>> without_login("http://me:secret@collector:4318/v1"), without_login("a@b")
    ('http://...@collector:4318/v1', 'a@b')
    """
    if not isinstance(value, str):
        return value
    return re.sub(r"(?<=://)[^/@]*(?:@[^/@]*)*@", "...@", value)
