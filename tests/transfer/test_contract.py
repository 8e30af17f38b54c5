"""What every transport promises, asked of each of them."""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from ess.errors import BadInput, BadState
from ess.transfer.messages import Seal, checksum
from ess.transfer.transport import Completed, Failed, Notification, PeerLost, Transfer
from tests.server.harness import until
from tests.support.manual_clock import ManualClock
from tests.transfer.rigs import (
    KINDS,
    LAYOUT,
    POISON,
    TICKET,
    Rig,
    heard,
    identity,
    join,
    pages,
    pump,
    region,
    rigged,
    write,
)


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with rigged(request.param) as made:
        yield made


def expected(local, remote, size: int, sources, targets) -> np.ndarray:
    """The receiver's memory when exactly these pages have moved."""
    wanted = np.full_like(remote, POISON)
    for source, target in zip(sources, targets, strict=True):
        wanted[target * size : (target + 1) * size] = local[source * size : (source + 1) * size]
    return wanted


@pytest.mark.parametrize("size", [7, 656, 4_099, 132 * 64, 656 * 64])
@pytest.mark.parametrize("count", [1, 3, 16, 61])
def test_pages_land_where_they_are_told_and_nowhere_else(rig: Rig, size: int, count: int) -> None:
    total = 2 * count + 1
    sender, receiver, local, remote = rig.pair(total * size)
    draw = np.random.default_rng(count)
    sources, targets = (draw.permutation(total)[:count].tolist() for _ in range(2))
    handle = sender.post(write(receiver.epoch, sources, targets, size, note=b"landed"))
    seen = pump([sender, receiver], lambda seen: all(seen))
    assert seen[0] == [Completed(handle)]
    assert seen[1] == [Notification(sender.epoch, b"landed")]
    wanted = expected(local.memory, remote.memory, size, sources, targets)
    assert checksum([remote.memory.data]) == checksum([wanted.data])


def test_a_notification_is_seen_after_its_bytes(rig: Rig) -> None:
    size = 41_984
    sender, receiver, local, remote = rig.pair(64 * size)
    order = np.random.default_rng(0).permutation(64).tolist()
    for page in order:
        sender.post(write(receiver.epoch, [page], [page], size, note=page.to_bytes(2, "little")))
    seen = 0
    while seen < len(order):
        sender.poll()
        for event in receiver.poll():
            assert isinstance(event, Notification)
            page = int.from_bytes(event.content, "little")
            part = slice(page * size, (page + 1) * size)
            assert np.array_equal(remote.memory[part], local.memory[part])
            seen += 1


def test_a_notification_travels_alone(rig: Rig) -> None:
    sender, receiver, _, remote = rig.pair(64)
    handle = sender.post(Transfer(peer=receiver.epoch, notification=b"only this", within_s=9))
    seen = pump([sender, receiver], lambda seen: all(seen))
    assert seen == [[Completed(handle)], [Notification(sender.epoch, b"only this")]]
    assert (remote.memory == POISON).all()


BAD_TARGETS = {
    "unknown region": (7, 0, 64),
    "negative region": (-1, 0, 64),
    "before the region": (1, -1, 64),
    "past the region": (1, 4_096 - 63, 64),
    "far past the region": (1, 1 << 62, 64),
    "wraps around": (1, (1 << 63) - 32, 64),
}


@pytest.mark.parametrize("name", BAD_TARGETS)
def test_memory_that_is_not_registered_is_refused(rig: Rig, name: str) -> None:
    sender, receiver, _, remote = rig.pair(4_096)
    bad = np.array([(1, 0, 64), BAD_TARGETS[name]], np.int64)
    wish = Transfer(
        peer=receiver.epoch,
        local=pages([0, 2], 64),
        remote=bad,
        notification=b"x",
        ticket=TICKET,
        within_s=9,
    )
    handle = sender.post(wish)
    seen = pump([sender, receiver], heard(0, Failed))
    assert [event.handle for event in seen[0]] == [handle]
    assert "refused" in seen[0][0].reason
    assert not seen[1]
    assert (remote.memory == POISON).all()
    good = sender.post(write(receiver.epoch, [1], [1], 64))
    assert pump([sender, receiver], heard(0, Completed))[0] == [Completed(good)]


def test_a_ticket_is_asked_for_before_a_byte_lands(rig: Rig) -> None:
    sender, receiver, local, remote = rig.pair(4_096)
    if not receiver.guards:
        pytest.skip("this transport asks no peer")
    for allowed in (False, True, False):
        remote.memory[:] = POISON
        (receiver.allow if allowed else receiver.forbid)(77)
        sender.post(write(receiver.epoch, [0, 5], [3, 1], 64, ticket=77))
        (event,) = pump([sender, receiver], lambda seen: bool(seen[0]))[0]
        assert isinstance(event, Completed if allowed else Failed)
        wanted = expected(local.memory, remote.memory, 64, [0, 5], [3, 1])
        assert np.array_equal(remote.memory, wanted if allowed else np.full_like(wanted, POISON))


def test_no_byte_lands_without_a_ticket(rig: Rig) -> None:
    sender, receiver, _, remote = rig.pair(4_096)
    if not receiver.guards:
        pytest.skip("this transport asks no peer")
    sender.post(write(receiver.epoch, [0, 5], [3, 1], 64, ticket=0))
    (event,) = pump([sender, receiver], lambda seen: bool(seen[0]))[0]
    assert isinstance(event, Failed)
    assert "ticket 0 is not allowed" in event.reason
    assert (remote.memory == POISON).all()


def test_another_layout_is_refused(rig: Rig) -> None:
    ours, theirs = rig.end(), rig.end(identity(layout=bytes(32)))
    with pytest.raises(BadInput, match=f"layout {bytes(8).hex()}, we have {LAYOUT[:8].hex()}"):
        ours.connect(theirs.metadata())


def test_another_secret_is_refused(rig: Rig) -> None:
    ours, theirs = rig.end(), rig.end(identity(seal=Seal(b"quite another secret")))
    with pytest.raises(BadInput, match="not made with our secret"):
        ours.connect(theirs.metadata())


def test_metadata_is_refused_when_a_bit_of_it_is_another(rig: Rig) -> None:
    ours, theirs = rig.end(), rig.end()
    told = theirs.metadata()
    for bit in range(0, 8 * len(told), 5):
        wrong = bytearray(told)
        wrong[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadInput):
            ours.connect(bytes(wrong))


def test_nobody_is_reached_before_connecting(rig: Rig) -> None:
    lonely = rig.end()
    memory = region(rig.kind, 64)
    lonely.register([memory])
    handle = lonely.post(write(12345, [0], [0], 64))
    (event,) = lonely.poll()
    assert event == Failed(handle, "peer 0000000000003039 is not connected")


def test_a_restarted_worker_at_the_same_address_is_a_stranger(rig: Rig) -> None:
    sender = rig.end()
    local = region(rig.kind, 4_096, fill=1)
    sender.register([local])
    old = rig.end(name="decode")
    old.register([region(rig.kind, 4_096)])
    told = old.metadata()
    join(sender, old)
    sender.post(write(old.epoch, [0], [0], 64))
    pump([sender, old], lambda seen: all(seen))
    port = int(told.split(b" 127.0.0.1")[0][-5:]) if rig.kind == "tcp" else 0
    old.close()
    rig.ends.remove(old)
    again = rig.end(name="decode", port=port)
    fresh = region(rig.kind, 4_096)
    again.register([fresh])
    assert again.epoch != old.epoch
    sender.connect(told)
    handle = sender.post(write(old.epoch, [0], [0], 64))
    events = []
    while not {type(event) for event in events} >= {Failed, PeerLost}:
        events += sender.poll()
        assert again.poll() == []
        rig.clock.advance(0.1)
    assert [event.handle for event in events if isinstance(event, Failed)] == [handle]
    assert (fresh.memory == POISON).all()
    join(sender, again)
    handle = sender.post(write(again.epoch, [0], [7], 64))
    assert pump([sender, again], lambda seen: all(seen))[0] == [Completed(handle)]
    assert (fresh.memory[7 * 64 : 8 * 64] == 1).all()


def test_a_silent_peer_is_lost_and_a_busy_listener_loses_nobody(rig: Rig) -> None:
    clock = rig.clock
    assert isinstance(clock, ManualClock)
    sender, receiver, _, _ = rig.pair(4_096)
    sender.post(write(receiver.epoch, [0], [0], 64))
    receiver.post(write(sender.epoch, [0], [0], 64))
    pump([sender, receiver], lambda seen: all(len(events) == 2 for events in seen))
    for _ in range(20):
        clock.advance(1.0)
        for _ in range(50):
            assert sender.poll() + receiver.poll() == []
    if rig.kind in ("tcp", "shared"):
        clock.advance(60.0)
        for _ in range(50):
            assert sender.poll() + receiver.poll() == [], "both were away"
    told: list = []
    for _ in range(20):
        clock.advance(1.0)
        told += sender.poll()
    assert [type(event) for event in told] == [PeerLost]
    assert told[0].peer == receiver.epoch
    assert "silent" in told[0].reason


def test_a_worker_says_for_how_long_its_peers_may_be_silent(rig: Rig) -> None:
    assert isinstance(rig.clock, ManualClock)
    sender, receiver = rig.end(identity(silent_s=30.0)), rig.end()
    join(sender, receiver)
    rig.clock.advance(1.0)
    for _ in range(50):
        assert sender.poll() + receiver.poll() == []
    told: list = []
    for lost_count, silent_s in ((0, 28), (1, 4)):
        for _ in range(silent_s):
            rig.clock.advance(1.0)
            told += sender.poll()
        assert [type(event) for event in told] == [PeerLost] * lost_count


def test_after_disconnect_no_byte_of_the_peer_lands(rig: Rig) -> None:
    sender, receiver, _, remote = rig.pair(1 << 20)
    if not receiver.guards:
        pytest.skip("this transport asks no peer")
    sender.post(write(receiver.epoch, [0], [0], 64))
    pump([sender, receiver], lambda seen: all(seen))
    handle = sender.post(write(receiver.epoch, [1, 3], [1, 3], 1 << 18))
    receiver.disconnect(sender.epoch)
    remote.memory[:] = POISON
    seen = pump([sender, receiver], heard(0, Failed))
    assert handle in [event.handle for event in seen[0] if isinstance(event, Failed)]
    assert not any(isinstance(event, Notification) for event in seen[1])
    assert (remote.memory == POISON).all()


def test_our_own_disconnect_fails_what_is_under_way(rig: Rig) -> None:
    sender, receiver, _, _ = rig.pair(1 << 20)
    handles = [sender.post(write(receiver.epoch, [0], [0], 1 << 19)) for _ in range(3)]
    sender.disconnect(receiver.epoch)
    events = [event for event in sender.poll() if isinstance(event, Completed | Failed)]
    assert sorted(event.handle for event in events) == handles
    assert len(sender.poll()) == 0


WRONG = {
    "outside of our own memory": {"local": pages([1], 1 << 20)},
    "sizes": {"local": pages([0], 32)},
    "counts": {"local": pages([0, 1], 64)},
    "no deadline": {"within_s": float("inf")},
    "a deadline in the past": {"within_s": 0.0},
    "a long notification": {"notification": bytes(1 << 18)},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_wish_is_refused_at_once(rig: Rig, name: str) -> None:
    sender, receiver, _, remote = rig.pair(4_096)
    wish = write(receiver.epoch, [0], [0], 1 << 20 if "outside" in name else 64)
    with pytest.raises(BadInput):
        sender.post(replace(wish, **WRONG[name]))
    assert sender.poll() == []
    assert (remote.memory == POISON).all()


def test_nothing_is_left_after_close(rig: Rig) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def round_trip() -> None:
        with rigged(rig.kind) as inner:
            sender, receiver, _, _ = inner.pair(1 << 16)
            sender.post(write(receiver.epoch, [0], [3], 64))
            pump([sender, receiver], lambda seen: all(seen))

    round_trip()
    before = held()
    for _ in range(5):
        round_trip()
    until(lambda: all(map(operator.le, held(), before)), "no more than after the first")


def test_a_closed_transport_says_so(rig: Rig) -> None:
    sender, receiver, _, _ = rig.pair(64)
    sender.close()
    rig.ends.remove(sender)
    with pytest.raises(BadState, match="closed"):
        sender.post(write(receiver.epoch, [0], [0], 64))
