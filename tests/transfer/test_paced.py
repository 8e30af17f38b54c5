"""A link of a speed: what leaves when, on a clock that is set by hand."""

from __future__ import annotations

import numpy as np

from ess.bench.handoff.paced import PacedTransport
from ess.transfer.transport import Completed, Notification
from tests.transfer.rigs import Rig, join, region, rigged, write

PAGE = 1000


def paced_pair(rig: Rig) -> tuple[PacedTransport, object, np.ndarray]:
    sender = PacedTransport(rig.end(), bytes_per_s=PAGE, clock=rig.clock)
    receiver, local, remote = (
        rig.end(),
        region(rig.kind, 4 * PAGE, fill=1),
        region(rig.kind, 4 * PAGE),
    )
    sender.register([local])
    receiver.register([remote])
    join(sender, receiver)
    return sender, receiver, remote.memory


def landed(sender, receiver, memory: np.ndarray) -> list[bool]:
    for _ in range(3):
        sender.poll()
        receiver.poll()
    return [bool((page == 1).all()) for page in memory.reshape(4, PAGE)]


def test_bytes_leave_no_faster_than_the_link() -> None:
    with rigged("inprocess") as rig:
        sender, receiver, memory = paced_pair(rig)
        for page in range(3):
            sender.post(write(receiver.epoch, [page], [page], PAGE))
        assert landed(sender, receiver, memory) == [False] * 4
        rig.clock.advance(1.0)
        assert landed(sender, receiver, memory) == [True, False, False, False]
        rig.clock.advance(2.0)
        assert landed(sender, receiver, memory) == [True, True, True, False]


def test_a_link_that_was_idle_does_not_catch_up() -> None:
    with rigged("inprocess") as rig:
        sender, receiver, memory = paced_pair(rig)
        rig.clock.advance(4.0)
        sender.post(write(receiver.epoch, [0], [0], PAGE))
        assert landed(sender, receiver, memory) == [False] * 4
        rig.clock.advance(1.0)
        assert landed(sender, receiver, memory)[0]


def test_ends_come_under_the_handles_that_were_given() -> None:
    with rigged("inprocess") as rig:
        sender, receiver, _ = paced_pair(rig)
        sender._inner.post(write(receiver.epoch, [3], [3], PAGE))
        handles = [sender.post(write(receiver.epoch, [page], [page], PAGE)) for page in range(2)]
        seen, told = [], []
        for _ in range(6):
            rig.clock.advance(1.0)
            seen += [event.handle for event in sender.poll() if isinstance(event, Completed)]
            told += [event for event in receiver.poll() if isinstance(event, Notification)]
        assert seen == handles
        assert len(told) == 3
