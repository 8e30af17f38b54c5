"""Sockets that a test leaves to the collector of garbage are named when it ends."""

from __future__ import annotations

import gc
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.left_sockets import left_by


class Client:
    """In a cycle, as those of HTTP are; its own finalizer closes what the collector meets later."""

    def __init__(self) -> None:
        self.itself = self
        self.socket = socket.socket()

    def __del__(self) -> None:
        self.socket.close()


@pytest.fixture
def _collects_when_asked() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_collects_when_asked")
def test_a_socket_is_named_also_where_its_client_would_have_closed_it() -> None:
    client = Client()
    made, sentence = [weakref.ref(client.socket)], f"unclosed {client.socket!r}"
    assert left_by(made) == [], "it is in use"
    del client
    assert left_by(made) == [sentence]


@pytest.mark.usefixtures("_collects_when_asked")
def test_what_else_the_collector_closes_is_not_named(tmp_path: Path) -> None:
    file: list[object] = [(tmp_path / "left").open("w")]
    file.append(file)
    del file
    with socket.socket() as held:
        made = [weakref.ref(held)]
        with pytest.warns(ResourceWarning, match="unclosed file"):
            assert left_by(made) == []


def test_nothing_is_collected_behind_a_test_that_closes_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("it takes a third of a second"))
    with socket.socket() as closed:
        pass
    assert left_by([weakref.ref(closed)]) == []
