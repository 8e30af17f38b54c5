"""Peers that are real processes, killed and stopped in the middle of a transfer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ess.transfer.transport import Completed, Failed, Notification, PeerLost, Transport
from tests.support.manual_clock import ManualClock
from tests.transfer.peer_process import PAGE, PAGE_COUNT, SIZE
from tests.transfer.rigs import GUARD_S, PROCESS_KINDS, Rig, region, rigged, write


@contextmanager
def worker(kind: str, role: str, ours: Transport) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has our metadata, and whose we have."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.transfer.peer_process", kind, role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            peer = ours.connect(bytes.fromhex(process.stdout.readline()))
            process.stdin.write(ours.metadata().hex() + "\n")
            process.stdin.flush()
            yield process, peer
        finally:
            process.kill()


@pytest.fixture(params=PROCESS_KINDS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with rigged(request.param, ManualClock()) as made:
        yield made


def events_until(end: Transport, form: type, count: int = 1) -> list:
    events: list = []
    guard_s = time.monotonic() + GUARD_S
    while sum(isinstance(event, form) for event in events) < count:
        assert time.monotonic() < guard_s, events
        events += end.poll()
    return events


def whole(peer: int, **more):
    return write(peer, range(PAGE_COUNT), range(PAGE_COUNT), PAGE, **more)


def stopped(process: subprocess.Popen[str]) -> None:
    """Returns when the kernel says that the process is stopped."""
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def test_a_receiver_killed_in_mid_transfer_is_told_at_once(rig: Rig) -> None:
    end = rig.end()
    end.register([region(rig.kind, SIZE)])
    with worker(rig.kind, "receive", end) as (process, peer):
        end.post(whole(peer))
        events_until(end, Completed)
        stopped(process)
        handles = {end.post(whole(peer)) for _ in range(40)}
        over = {event.handle for event in end.poll() if isinstance(event, Completed | Failed)}
        process.kill()
        process.wait()
        rig.clock.advance(1.1)
        events = events_until(end, PeerLost)
        ends = [event.handle for event in events if isinstance(event, Completed | Failed)]
        assert len(ends) == len(set(ends))
        assert {*ends, *over} == handles
        if rig.kind == "tcp":
            assert any(isinstance(event, Failed) for event in events)
        late = end.post(whole(peer))
        assert Failed(late, f"peer {peer:016x} is not connected") in end.poll()


def test_a_sender_killed_in_mid_transfer_is_lost(rig: Rig) -> None:
    end = rig.end()
    end.register([region(rig.kind, SIZE)])
    with worker(rig.kind, "send", end) as (process, peer):
        events_until(end, Notification, 5)
        process.kill()
        process.wait()
        rig.clock.advance(1.1)
        lost = [event for event in events_until(end, PeerLost) if isinstance(event, PeerLost)]
        assert [event.peer for event in lost] == [peer]


def test_a_stopped_receiver_costs_the_deadline_and_no_more(rig: Rig) -> None:
    end = rig.end()
    end.register([region(rig.kind, SIZE)])
    with worker(rig.kind, "receive", end) as (process, peer):
        end.post(whole(peer))
        events_until(end, Completed)
        stopped(process)
        handles = [end.post(whole(peer, within_s=2.0)) for _ in range(10)]
        events = [event for _ in range(200) for event in end.poll()]
        rig.clock.advance(1.9)
        events += end.poll()
        assert not any(isinstance(event, Failed) for event in events)
        rig.clock.advance(0.2)
        events += end.poll()
        ends = [event.handle for event in events if isinstance(event, Completed | Failed)]
        assert sorted(ends) == handles, "each has ended, once, and no poll has waited"
        if rig.kind != "nixl":
            assert PeerLost(peer, "a transfer missed its deadline") in events
            assert any(isinstance(event, Failed) for event in events)
        os.kill(process.pid, signal.SIGCONT)
