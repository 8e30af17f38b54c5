"""A port that is kept for a program which will listen there.

A port that was free a moment ago may be anybody's now: connections that leave this machine take
theirs from the same range. A kept port is bound, and nobody listens on it. The system then gives it
to nobody; but a program that asks for this very port with SO_REUSEADDR, as servers do, can listen
on it, and listen again after its end.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from ess.errors import Unavailable


@contextlib.contextmanager
def kept_port(host: str, port: int = 0) -> Iterator[int]:
    """This port, or with 0 a free one, until the block ends. Unavailable if somebody listens."""
    with _bound(host, port) as kept:
        yield int(kept.getsockname()[1])


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except OSError:
            made.close()
            raise
    except OSError as error:
        raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return made
