"""Where the server listens: at a port, or at a Unix socket that belongs to one user."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Final

from ess.errors import Unavailable

BACKLOG: Final = 2048


def listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, number)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror}") from None
    made.setblocking(False)
    return made


def listen_at(path: Path) -> socket.socket:
    """Only this user may connect. A socket file that a dead server left is replaced.

    The file never has wider rights, not even for a moment: it is made under a strict umask.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        _clear(path)
        made.bind(str(path))
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        raise Unavailable(f"cannot listen on {path}: {error.strerror or error}") from None
    finally:
        os.umask(before)
    made.setblocking(False)
    return made


def _clear(path: Path) -> None:
    """Removes a socket that nobody listens on; anything else stays, and the bind fails."""
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


def close(listener: socket.socket, path: str) -> None:
    """A Unix socket's file goes with it: the next client is told that nobody is there."""
    listener.close()
    if path:
        Path(path).unlink(missing_ok=True)
