"""A kept port goes to the program that it is kept for, and to no other."""

from __future__ import annotations

import socket

import pytest

from ess.errors import Unavailable
from ess.ports import kept_port
from ess.server.process.listening import sockets

HOST = "127.0.0.1"


def test_a_server_may_listen_on_it_again_and_again():
    with kept_port(HOST) as port:
        for _ in range(3):
            with (
                socket.create_server((HOST, port)) as server,
                socket.create_connection((HOST, port)) as client,
                server.accept()[0] as met,
            ):
                met.sendall(b"hello")
                assert client.recv(5) == b"hello"


def test_the_system_gives_it_to_nobody():
    """Neither a process that asks for any port gets it, nor a process that binds it by its
    number."""
    with kept_port(HOST) as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((HOST, port))
        taken = [socket.create_server((HOST, 0)) for _ in range(500)]
        assert port not in {each.getsockname()[1] for each in taken}
        for each in taken:
            each.close()


def test_a_port_that_somebody_listens_on_is_refused():
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        says = f"cannot listen on {HOST}:{port}: Address already in use; give another with "
        with pytest.raises(Unavailable, match=rf"^{says}--port, or 0 for any free one$"):
            kept_port(HOST, port).__enter__()
        with pytest.raises(Unavailable, match=rf"^{says}--bootstrap-port$"):
            sockets.listen(HOST, port, another="--bootstrap-port")


def test_what_fails_inside_is_not_the_ports_fault():
    with pytest.raises(OSError, match="the disk is full"), kept_port(HOST):
        raise OSError(28, "the disk is full")
