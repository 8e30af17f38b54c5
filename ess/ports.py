"""A port that is reserved for a program which will listen on it.

A port that was free a moment ago may be in use now: connections that leave this machine take theirs
from the same range. A reserved port is bound, but has no listener. The system gives it to no other
socket; but a program that asks for this very port with SO_REUSEADDR, as servers do, can listen on
it, and again after a restart.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from typing import Final

from ess.errors import Unavailable

ANOTHER: Final = "--port, or 0 for any free one"


@contextlib.contextmanager
def kept_port(host: str, port: int = 0) -> Iterator[int]:
    """Reserves this port, or for 0 any free one, until the block ends; Unavailable if in use."""
    with _bound(host, port) as kept:
        yield int(kept.getsockname()[1])


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise not_listening(host, port, error) from None
    return listener


def not_listening(host: str, port: int, error: OSError, another: str = ANOTHER) -> Unavailable:
    """The refusal of an address, with what a user may do."""
    hints = {
        errno.EADDRINUSE: f"; give another with {another}",
        errno.EADDRNOTAVAIL: f"; no interface of this machine has {host}; give 0.0.0.0 for all",
    }
    hint = hints.get(error.errno or 0, "")
    return Unavailable(f"cannot listen on {host}:{port}: {error.strerror}{hint}")
