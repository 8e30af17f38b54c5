"""Which requests are served without a key: all but those of other sites' pages.

A page that the user happens to open can make the user's browser send requests to a server on the
same machine, or behind the same firewall. Three signs reveal it; programs that are not browsers
show none of them.

    Host            is a name that is not ours: the page's own name now leads to this machine.
                    An address cannot be made to lead elsewhere, so every address is accepted
    Sec-Fetch-Site  the browser says that another site's page sends the request
    Origin          is not the host that was asked, for browsers without Sec-Fetch-Site

With a key this check is unnecessary: a browser adds no key by itself.

Pages of the origins in `--allowed-origins` are served, with a key or without. A browser shows a
page our answer only if it says so (CORS), and asks first, without a key, whether it may ask at all.
No cookie is ever read, so credentials are never allowed: a page sends its key in a header.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from ess.server.http.page_addresses import ANY, PORTS
from ess.server.http.responses import Foreign

AUTHORITY: Final = re.compile(r"(\[[^\]]*\]|[^:\[\]/@]*)(?::(\d*))?")
LOCAL: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


def check_page(
    headers: Sequence[tuple[bytes, bytes]], names: Collection[str], *, allowed: bool = False
) -> None:
    """`names` are ours besides localhost and all addresses; `*` stands for every name. Pages of an
    origin that is `allowed` may ask under these names."""
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    for host in hosts:
        if ANY not in names and not _is_ours(_split(host)[0], names):
            raise Foreign(
                f"{host!r:.100} is not a name of this server: add it to --allowed-hosts; "
                "with an API key every name is accepted"
            )
    if allowed:
        return
    for name, value in headers:
        if name == b"sec-fetch-site" and value not in (b"same-origin", b"none"):
            raise Foreign(
                "a page of another site sent this; a server without an API key refuses that"
            )
        if name == b"origin":
            _check_origin(value.decode("latin-1"), hosts, names)


Headers = list[tuple[bytes, bytes]]


def shared_with(origin: bytes, origins: Collection[str]) -> Headers:
    """The headers that let a page read an answer, if its origin is allowed. Where the answers to
    pages differ, a cache must not give one page the answer to another."""
    varying: Headers = [(b"vary", b"origin")] if origins and ANY not in origins else []
    if not is_allowed(origin, origins):
        return varying
    return [
        (b"access-control-allow-origin", b"*" if ANY in origins else origin),
        (b"access-control-expose-headers", b"*"),
        *varying,
    ]


def is_allowed(origin: bytes, origins: Collection[str]) -> bool:
    """Whether a page with this origin may ask."""
    return bool(origin) and (ANY in origins or origin.decode("latin-1").lower() in origins)


def permitted(headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """The answer to a browser that asks whether an allowed page may ask: as it wants to."""
    wanted = headers.get(b"access-control-request-headers", b"").decode("latin-1")
    answer = {
        "access-control-allow-methods": "GET, HEAD, POST, DELETE",
        "access-control-allow-headers": wanted,
        "access-control-max-age": "600",
    }
    if b"access-control-request-private-network" in headers:
        answer["access-control-allow-private-network"] = "true"
    return answer


def _check_origin(origin: str, hosts: Sequence[str], names: Collection[str]) -> None:
    scheme, _, authority = origin.partition("://")
    name, port = _split(authority, PORTS.get(scheme, ""))
    asked = [_split(host, PORTS.get(scheme, "")) for host in hosts]
    if not (name and ((name, port) in asked or name in names)):
        raise Foreign(
            f"a page of {origin!r:.100} sent this; a server without an API key refuses that"
        )


def _split(authority: str, port: str = "") -> tuple[str, str]:
    parts = AUTHORITY.fullmatch(authority.lower())
    return ("", "") if parts is None else (parts[1].rstrip("."), parts[2] or port)


def _is_ours(name: str, names: Collection[str]) -> bool:
    if name in LOCAL or name in names:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
