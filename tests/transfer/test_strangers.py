"""What any client may send to a listening port, and what it costs us: nothing."""

from __future__ import annotations

import os
import random
import socket
import struct
import tracemalloc
import zlib

import numpy as np
import pytest

from ess.errors import BadInput, Unavailable
from ess.transfer.transport import Completed, Failed, PeerLost
from ess.transfer.transports import channel
from ess.transfer.transports.channel import Channel, Kind
from ess.transfer.transports.streams import STRANGERS_MAX
from ess.transfer.transports.tcp import TcpTransport
from tests.support.manual_clock import ManualClock
from tests.transfer.rigs import (
    POISON,
    TICKET,
    Rig,
    heard,
    identity,
    join,
    pages,
    pump,
    rigged,
    write,
)


@pytest.fixture
def rig():
    with rigged("tcp") as made:
        yield made


def port_of(end: TcpTransport) -> int:
    return end._listener.getsockname()[1]


def dialled(end: TcpTransport) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(end)))


def works(sender, receiver) -> bool:
    handle = sender.post(write(receiver.epoch, [0], [1], 64))
    return Completed(handle) in pump([sender, receiver], heard(0, Completed))[0]


def frame(kind: int, *, runs=b"", note=b"", transfer=1, size=0) -> bytes:
    head = struct.pack(
        *("<2sBBIIIQQQ", b"EX", kind, 0, len(runs) // 24, len(note)),
        *(zlib.crc32(runs + note), transfer, TICKET, size),
    )
    return head + struct.pack("<I", zlib.crc32(head)) + runs + note


def refusing(end: TcpTransport, *contents: bytes) -> bool:
    """Whether the connection that says this is closed."""
    with dialled(end) as sock:
        sock.setblocking(False)
        for content in contents:
            sock.sendall(content)
        for _ in range(1_000):
            assert end.poll() == []
            try:
                if not sock.recv(4_096):
                    return True
            except BlockingIOError:
                continue
            except ConnectionResetError:
                return True
    return False


HOSTILE = {
    "http": b"GET / HTTP/1.1\r\nHost: ess\r\n\r\n" + bytes(64),
    "zeros": bytes(4_096),
    "a write before the Hello": frame(2, runs=struct.pack("<3q", 1, 0, 64), size=64) + bytes(64),
    "a read before the Hello": frame(3, runs=struct.pack("<3q", 1, 0, 64)),
    "an answer before the Hello": frame(4, size=64) + bytes(64),
    "an unknown kind": frame(99),
    "a huge payload": frame(2, size=1 << 60),
    "an empty Hello": frame(1),
    "a Hello of noise": frame(1, note=random.Random(1).randbytes(120)),
    "a Hello with payload": frame(1, note=bytes(120), size=1 << 20),
    "too much note": struct.pack("<2sBBIIIQQQ", b"EX", 1, 0, 0, 1 << 31, 0, 0, 0, 0),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_peer_says_ends_the_connection(rig: Rig, name: str) -> None:
    sender, receiver, _, remote = rig.pair(4_096)
    content = HOSTILE[name]
    if name == "too much note":
        content += struct.pack("<I", zlib.crc32(content))
    assert refusing(receiver, content)
    assert (remote.memory == POISON).all()
    assert works(sender, receiver)


def test_a_recorded_handshake_opens_no_second_connection(rig: Rig) -> None:
    """The Hello of a true peer, said again by a stranger, answers another nonce."""
    sender, receiver, _, _ = rig.pair(4_096)
    said: list[bytes] = []
    real = Channel.send

    def overheard(channel: Channel, kind: Kind, **more) -> None:
        said.append(frame(kind, note=more["note"]) if kind is Kind.HELLO else b"")
        real(channel, kind, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "send", overheard)
        assert works(sender, receiver)
    hellos = [each for each in said if each]
    assert len(hellos) == 6, "two connections of three each"
    for hello in hellos:
        assert refusing(receiver, hello)
    assert works(sender, receiver)


def test_junk_on_many_connections_leaves_the_peers_alone(rig: Rig) -> None:
    sender, receiver, _, remote = rig.pair(4_096)
    assert works(sender, receiver)
    before = remote.memory.copy()
    draw = random.Random(3)
    held = len(os.listdir("/proc/self/fd"))
    tracemalloc.start()
    for number in range(1_500):
        with dialled(receiver) as sock:
            name = draw.choice(list(HOSTILE)) if number % 2 else ""
            sock.sendall(HOSTILE.get(name, b"") + draw.randbytes(draw.randrange(200)))
            assert receiver.poll() == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    for _ in range(200):
        assert receiver.poll() == []
    assert peak < 8 << 20
    assert len(os.listdir("/proc/self/fd")) <= held + 1
    assert np.array_equal(remote.memory, before)
    assert works(sender, receiver)


def test_silent_strangers_are_bounded_and_forgotten(rig: Rig) -> None:
    sender, receiver, _, _ = rig.pair(4_096)
    assert works(sender, receiver)
    held = len(os.listdir("/proc/self/fd"))
    strangers = []
    for _ in range(3 * STRANGERS_MAX):
        strangers.append(dialled(receiver))
        receiver.poll()
    assert len(os.listdir("/proc/self/fd")) - held - len(strangers) <= STRANGERS_MAX
    clock = rig.clock
    assert isinstance(clock, ManualClock)
    for _ in range(20):
        clock.advance(0.5)
        sender.poll()
        receiver.poll()
    assert len(os.listdir("/proc/self/fd")) - held <= len(strangers)
    for sock in strangers:
        sock.close()
    assert works(sender, receiver)


class Insider:
    """A peer that holds the secret and says what it likes."""

    def __init__(self, rig: Rig) -> None:
        self.sender, self.receiver, _, self.remote = rig.pair(4_096)
        assert works(self.sender, self.receiver)
        self.remote.memory[:] = POISON
        self.channel = self.sender._ours[self.receiver.epoch].channel

    def says(self, content: bytes) -> list:
        self.channel._out.append(memoryview(content))
        return pump([self.sender, self.receiver], heard(1, PeerLost))[1]


@pytest.mark.parametrize(
    "content",
    [
        frame(5, transfer=12_345),
        frame(4, transfer=12_345, size=8) + bytes(8),
        frame(6, transfer=12_345),
        frame(2, runs=struct.pack("<3q", 1, 0, 64), size=65) + bytes(65),
        frame(2, runs=struct.pack("<3q", 1, 0, 64), size=63) + bytes(63),
        frame(1),
        frame(7)[:-1] + b"\0" + bytes(60),
    ],
    ids=["accepts", "answers", "refuses", "too long", "too short", "greets twice", "out of step"],
)
def test_an_insider_that_breaks_the_rules_is_lost(rig: Rig, content: bytes) -> None:
    insider = Insider(rig)
    told = insider.says(content)
    assert [type(event) for event in told] == [PeerLost]
    assert (insider.remote.memory == POISON).all()


def test_bytes_that_come_after_a_ticket_has_ended_go_nowhere(rig: Rig) -> None:
    """A write that is half in our memory when its handoff is given up lands no further."""
    size = 8 << 20
    sender, receiver, _, remote = rig.pair(size)
    receiver.allow(3)
    handle = sender.post(write(receiver.epoch, [0], [0], size, ticket=3))
    while not (remote.memory[:64] != POISON).any():
        sender.poll()
        receiver.poll()
    remote.memory[:] = POISON
    assert not sender.poll(), "too large to be in the stream at once"
    receiver.forbid(3)
    (event,) = pump([sender, receiver], lambda seen: bool(seen[0]))[0]
    assert isinstance(event, Failed)
    assert event.handle == handle
    assert "ticket 3 has ended" in event.reason
    assert (remote.memory == POISON).all()
    assert works(sender, receiver)


def test_a_runs_bit_flipped_under_way_is_found(rig: Rig) -> None:
    insider = Insider(rig)
    wrong = bytearray(frame(2, runs=struct.pack("<3q", 1, 0, 64), size=64) + bytes(64))
    wrong[44 + 8] ^= 64
    told = insider.says(bytes(wrong))
    assert [type(event) for event in told] == [PeerLost]
    assert (insider.remote.memory == POISON).all()


def test_nobody_answers_in_place_of_another(rig: Rig) -> None:
    """A second peer that guesses a handle neither completes nor refuses it."""
    sender, receiver, _, _ = rig.pair(4_096)
    other = rig.end()
    join(sender, other)
    assert works(sender, receiver)
    pump([sender, other], lambda seen: sender._ours[other.epoch].is_met)
    handle = sender.post(write(receiver.epoch, [0], [0], 64))
    for link in other._links:
        link.channel._out.append(memoryview(frame(Kind.ACCEPTED, transfer=handle)))
    events = pump([sender, other], heard(0, PeerLost))[0]
    assert [event.peer for event in events] == [other.epoch]
    assert pump([sender, receiver], heard(0, Completed))[0] == [Completed(handle)]


def test_a_payload_that_comes_slowly_is_a_sign_of_life(rig: Rig) -> None:
    size = 96 << 20
    sender, receiver, local, remote = rig.pair(size)
    assert works(sender, receiver)
    handle = sender.post(write(receiver.epoch, [0], [0], size, within_s=1e6))
    clock = rig.clock
    assert isinstance(clock, ManualClock)
    events: list = []
    while not events:
        clock.advance(1.0)
        events += sender.poll()
        receiver.poll()
    assert events == [Completed(handle)]
    assert np.array_equal(remote.memory, local.memory)


def test_a_peer_that_does_not_read_costs_a_bounded_queue(rig: Rig) -> None:
    sender, receiver, _, _ = rig.pair(4_096)
    assert works(sender, receiver)
    ends = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "QUEUED_MAX", 1_000)
        for _ in range(5_000):
            sender.post(write(receiver.epoch, [0, 2], [3, 0], 64))
        ends = [event for event in sender.poll() if isinstance(event, Failed)]
    assert len(ends) > 4_000
    assert "does not read" in ends[0].reason


@pytest.mark.parametrize(
    "address",
    [b"", b"80", b"80 localhost", b"x 127.0.0.1", b"99999 127.0.0.1", b"80 0x7f000001", b"\xff"],
)
def test_an_address_is_numbers(rig: Rig, address: bytes) -> None:
    with pytest.raises(BadInput, match="not an address of a peer"):
        rig.end().connect(identity().hello(address=address))


def test_a_port_in_use_is_unavailable(rig: Rig) -> None:
    taken = port_of(rig.end())
    with pytest.raises(Unavailable, match=f"127.0.0.1 port {taken}"):
        TcpTransport(identity(), port=taken)


def test_nobody_listening_is_a_lost_peer(rig: Rig) -> None:
    gone = rig.end()
    told = gone.metadata()
    gone.close()
    rig.ends.remove(gone)
    sender, receiver, _, _ = rig.pair(4_096)
    peer = sender.connect(told)
    handle = sender.post(write(peer, [0], [0], 64))
    seen = pump([sender, receiver], heard(0, PeerLost))[0]
    assert [type(event) for event in seen] == [Failed, PeerLost]
    assert seen[0].handle == handle
    join(sender, receiver)
    assert works(sender, receiver)
    assert len(pages([1], 64)) == 1
