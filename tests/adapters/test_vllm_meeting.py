"""The small HTTP server by which decode workers meet a vLLM worker: real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

from ess.adapters.vllm.meeting import BODY_BYTES_MAX, CALLERS_MAX, MeetingPlace
from ess.errors import BadInput, Unavailable
from tests.server.harness import until


def meet(content: bytes) -> bytes:
    if not content.startswith(b"sealed"):
        raise BadInput("the frame's tag is not made with our secret")
    return b"ours for " + content


@pytest.fixture
def place() -> Iterator[MeetingPlace]:
    made = MeetingPlace(host="127.0.0.1", port=0, meet=meet)
    yield made
    made.close()


def asked(place: MeetingPlace, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    call = HTTPConnection("127.0.0.1", place.port, timeout=60)
    call.request(method, path, body)
    answer = call.getresponse()
    content = answer.read()
    call.close()
    return answer.status, content


def test_sealed_metadata_is_answered_with_ours(place: MeetingPlace) -> None:
    assert asked(place, "POST", "/peers", b"sealed \x00\xff") == (200, b"ours for sealed \x00\xff")


def test_others_are_told_no(place: MeetingPlace) -> None:
    assert asked(place, "POST", "/peers", b"forged")[0] == 400
    assert asked(place, "POST", "/elsewhere", b"sealed")[0] == 404
    assert asked(place, "GET", "/peers")[0] == 501
    assert asked(place, "POST", "/peers", b"sealed" * BODY_BYTES_MAX)[0] == 400


def test_a_length_that_is_no_number_is_refused(place: MeetingPlace) -> None:
    for length in ("-1", "1e3", "٣", ""):
        with socket.create_connection(("127.0.0.1", place.port), timeout=60) as sock:
            head = f"POST /peers HTTP/1.1\r\nContent-Length: {length}\r\n\r\n"
            sock.sendall(head.encode())
            assert b" 400 " in sock.recv(4096)


def test_many_silent_callers_take_no_threads_without_bound(place: MeetingPlace) -> None:
    thread_count = threading.active_count()
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", place.port), timeout=60))
            for _ in range(2 * CALLERS_MAX)
        ]
        turned_away = 0
        for sock in silent[CALLERS_MAX:]:
            try:
                turned_away += sock.recv(1) == b""
            except ConnectionResetError:
                turned_away += 1
        assert turned_away == CALLERS_MAX
        # The thread of a caller who was turned away may take a moment to end.
        until(lambda: threading.active_count() <= thread_count + CALLERS_MAX, "their threads' end")


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"127.0.0.1 port {port}"):
            MeetingPlace(host="127.0.0.1", port=port, meet=meet)
