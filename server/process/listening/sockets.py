"""The server's listeners: at a port, or at a Unix socket that belongs to one user."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ess.errors import Unavailable, reason_of
from ess.ports import ANOTHER, not_listening

BACKLOG: Final = 2048


def listen(host: str, port: int, count: int = 1, *, another: str = ANOTHER) -> list[socket.socket]:
    """`count` listeners at one port; the kernel divides connections among them. Listeners that
    share a port would let others of the same user join in, so one that shares nothing must get the
    port first. `another` says how a user gives another port."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        if count == 1:
            return [_listening(family, address, shares=False)]
        with _listening(family, address, shares=False) as first:
            address = first.getsockname()
        return [_listening(family, address, shares=True) for _ in range(count)]
    except OSError as error:
        raise not_listening(host, port, error, another) from None


def _listening(family: int, address: Any, *, shares: bool) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares))
        made.bind(address)
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    made.setblocking(False)
    return made


def listen_at(path: Path, count: int = 1) -> list[socket.socket]:
    """The same listener `count` times; an idle process takes the next connection. Only this user
    may connect. A socket file left by a dead server is replaced.

    The file never has wider rights, not even for a moment: it is created under a strict umask.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        _clear(path)
        made.bind(str(path))
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise Unavailable(f"cannot listen on {path}: {reason_of(error)}") from None
    finally:
        os.umask(before)
    made.setblocking(False)
    return [made, *(made.dup() for _ in range(count - 1))]


def _clear(path: Path) -> None:
    """Removes a socket without a listener; anything else stays, and the bind fails."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()


def close(listeners: Sequence[socket.socket], path: str) -> None:
    """Closes them and removes a Unix socket's file, so that clients see that nothing listens."""
    for listener in listeners:
        listener.close()
    if path:
        Path(path).unlink(missing_ok=True)
