"""What must be refused: absurd headers, strangers, wrong secrets, and pickled objects anywhere."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ess.comm.ending import Ending
from ess.comm.link import HEAD_BYTES_MAX, LinkLost
from ess.comm.processes import control
from ess.comm.processes.control import Ends, Kind, Wire, answer, greet
from ess.comm.processes.meeting import join_group
from ess.comm.processes.tensors import SHAPE_BYTES, pack_shape, unpack_shape
from ess.comm.processes.wired import Terms, WiredLink
from ess.errors import BadInput, Unavailable
from ess.ports import kept_port
from ess.prefill.worker import is_over
from tests.house.tree import texts

ENDS = Ends(1, 0, 1, 0)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


@pytest.fixture
def wires() -> Iterator[tuple[Wire, Wire, socket.socket]]:
    """Two ends that have greeted one another, and the dialler's bare socket."""
    ours, theirs = tcp_pair()
    made: list[tuple[Ends, Wire]] = []
    thread = threading.Thread(
        target=lambda: made.append(answer(theirs, b"s", {ENDS}, patience_s=5))
    )
    thread.start()
    dialler = greet(ours, ENDS, b"s", patience_s=5)
    thread.join(10)
    yield dialler, made[0][1], ours
    dialler.close()
    made[0][1].close()


def test_a_dialler_waits_while_strangers_are_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    (ours, theirs), *silent = tcp_pair(), tcp_pair(), tcp_pair()
    with ThreadPoolExecutor(1) as threads:
        with monkeypatch.context() as patched:
            patched.setattr(control, "GREETING_S", 0.1)
            dialled = threads.submit(greet, ours, ENDS, b"s", patience_s=5)
            theirs.recv(1, socket.MSG_PEEK)
            for stranger, heard in silent:
                with stranger, pytest.raises(TimeoutError):
                    answer(heard, b"s", {ENDS}, patience_s=5)
        answer(theirs, b"s", {ENDS}, patience_s=5)[1].close()
        dialled.result(10).close()


def test_messages_arrive_as_they_were_written(wires: tuple[Wire, Wire, socket.socket]) -> None:
    dialler, answerer, _ = wires
    dialler.write(Kind.FRAME, b"abc")
    assert dialler.try_write(Kind.BYE)
    assert answerer.read() == (Kind.FRAME, b"abc")
    assert answerer.read() == (Kind.BYE, b"")
    dialler.end_writing()
    assert answerer.read() is None


@pytest.mark.parametrize(
    ("start", "sentence"),
    [
        (struct.pack("<2sBBIQ", b"EL", 1, 0, 0xFFFFFFFF, 0), "FRAME with 4294967295 bytes"),
        (struct.pack("<2sBBIQ", b"EL", 3, 0, 9, 0), "BEAT with 9 bytes, at most 8"),
        (struct.pack("<2sBBIQ", b"EL", 99, 0, 0, 0), "no message begins"),
        (struct.pack("<2sBBIQ", b"EL", 5, 0, 0, 0), "message 0 is not sealed"),
    ],
)
def test_an_absurd_start_is_refused_before_its_body(
    wires: tuple[Wire, Wire, socket.socket], start: bytes, sentence: str
) -> None:
    """Nothing follows the start: what waited for the body would never end."""
    _, answerer, bare = wires
    bare.sendall(start + bytes(16))
    with pytest.raises(BadInput, match=sentence):
        answerer.read()


def test_a_message_cannot_be_repeated(wires: tuple[Wire, Wire, socket.socket]) -> None:
    dialler, answerer, bare = wires
    content = dialler._sealed(Kind.FRAME, b"pay")
    bare.sendall(content + content)
    assert answerer.read() == (Kind.FRAME, b"pay")
    with pytest.raises(BadInput, match="message 0 is not sealed, or out of order"):
        answerer.read()


SHAPES = [
    (8, 4, [1 << 40, 1 << 40, 1, 1]),
    (8, 1, [(1 << 63) + 1, 0, 0, 0]),
    (8, 1, [1, 1, 0, 0]),
    (8, 5, [1, 1, 1, 1]),
    (8, 0, [1, 0, 0, 0]),
    (200, 1, [1, 0, 0, 0]),
]


@pytest.mark.parametrize(("kind", "dims", "sizes"), SHAPES)
def test_an_absurd_shape_is_refused(kind: int, dims: int, sizes: list[int]) -> None:
    with pytest.raises(BadInput, match=r"a tensor of|no tensor has"):
        unpack_shape(struct.pack("<BBH4Q", kind, dims, 0, *sizes))


class Untouched:
    """A way over which nothing may be received."""

    def post(self, content: torch.Tensor) -> None:
        raise AssertionError

    receive = post

    def wake(self) -> None:
        return


@pytest.mark.parametrize(("kind", "dims", "sizes"), SHAPES)
def test_an_absurd_shape_ends_the_link_and_allocates_nothing(
    wires: tuple[Wire, Wire, socket.socket], kind: int, dims: int, sizes: list[int]
) -> None:
    dialler, answerer, _ = wires
    ending = Ending()
    terms = Terms(peer=7, name="stage 7", device=torch.device("cpu"))
    link = WiredLink(answerer, terms, ending, inward=Untouched())
    link.start()
    dialler.write(Kind.FRAME, struct.pack("<BBH4Q", kind, dims, 0, *sizes))
    with pytest.raises(LinkLost, match=r"stage 7 is lost: (a|no) tensor"):
        link.receive(30)
    link.close()


def test_a_stage_that_leaves_in_order_may_take_its_time(
    wires: tuple[Wire, Wire, socket.socket],
) -> None:
    """The stage waits for the goodbyes of others, and frees its pools."""
    dialler, answerer, _ = wires
    ending = Ending()
    link = WiredLink(answerer, Terms(peer=0, name="stage 0", device=torch.device("cpu")), ending)
    link.start()
    assert not is_over(link, None)
    link.leave()
    assert not is_over(link, None)
    ending.fail(LinkLost(2, "stage 2 is lost"))
    assert is_over(link, None)
    dialler.cut()
    link.part(0.0)


def test_shapes_come_back() -> None:
    for dtype in (torch.float32, torch.float8_e4m3fn, torch.bool):
        tensor = torch.zeros(3, 0, 5).to(dtype)
        assert unpack_shape(pack_shape(tensor)) == (dtype, [3, 0, 5])
    assert unpack_shape(pack_shape(None)) is None
    assert len(pack_shape(None)) == SHAPE_BYTES
    with pytest.raises(BadInput, match="complex64"):
        pack_shape(torch.zeros(1, dtype=torch.complex64))
    assert HEAD_BYTES_MAX < 1 << 32


def test_who_does_not_know_the_secret_is_no_peer() -> None:
    ours, theirs = tcp_pair()
    refused: list[BaseException] = []

    def be_dialled() -> None:
        try:
            answer(theirs, b"right", {ENDS}, patience_s=5)
        except (BadInput, OSError) as wrong:
            refused.append(wrong)
        theirs.close()

    thread = threading.Thread(target=be_dialled)
    thread.start()
    with pytest.raises(BadInput, match="rank 0 does not know the secret of the group"):
        greet(ours, ENDS, b"wrong", patience_s=5)
    ours.close()
    thread.join(10)
    assert refused


def test_who_is_missing_is_named() -> None:
    with kept_port("127.0.0.1") as port:
        with pytest.raises(Unavailable) as refused:
            join_group(0, 3, init=f"tcp://127.0.0.1:{port}", timeout_s=0.3, generation=5)
        assert str(refused.value) == (
            f"missing in generation 5 at 127.0.0.1:{port} after 0.3 s: "
            "stage 1 (rank 1), stage 2 (rank 2)"
        )
        with pytest.raises(Unavailable, match=r"after 0.3 s: stage 0 \(rank 0\)"):
            join_group(1, 3, init=f"tcp://127.0.0.1:{port}", timeout_s=0.3)


@pytest.mark.parametrize("init", ["tcp://x", "udp://h:1", "tcp://:1", "tcp://h:99999"])
def test_a_place_to_meet_that_is_none(init: str) -> None:
    with pytest.raises(BadInput, match="init is"):
        join_group(0, 2, init=init)


def test_env_names_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(BadInput, match="env:// needs MASTER_ADDR and MASTER_PORT"):
        join_group(0, 2, init="env://")


def test_no_object_is_pickled_between_ranks() -> None:
    banned = re.compile(r"pickle|_object\b|_object_list|marshal|\beval\(|torch\.(save|load)\(")
    lines = [
        f"{name}: {match[0]}"
        for name, text in texts(".py")
        if name.startswith("ess/comm/")
        for match in banned.finditer(text)
    ]
    assert not lines
