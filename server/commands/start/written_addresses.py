"""Addresses as operators write them, and lists of them."""

from __future__ import annotations

import ipaddress
import re
from typing import Any, Final

import msgspec

from ess.decoding import UNDECODABLE
from ess.errors import BadInput
from ess.server.http.origins import ANY

ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+")


def listed(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def read_origins(text: str) -> tuple[str, ...]:
    """Origins with commas between them or, as vLLM has them, as a JSON list.

    >>> read_origins("https://Chat.example, http://localhost:3000"), read_origins('["*"]')
    (('https://chat.example', 'http://localhost:3000'), ('*',))
    """
    try:
        given = msgspec.json.decode(text, type=list[str]) if text.startswith("[") else listed(text)
    except UNDECODABLE:
        raise BadInput(f"allowed_origins is {text!r:.80}, which is no list of texts") from None
    origins = tuple(origin.lower() for origin in given)
    for origin in origins:
        if origin != ANY and ORIGIN.fullmatch(origin) is None:
            raise BadInput(
                f"allowed_origins has {origin!r:.80}, must be as https://chat.example:8443, or *"
            )
    return origins


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
