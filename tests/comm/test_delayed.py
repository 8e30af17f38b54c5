"""A slowed link keeps order and content; asynchronous sends return before the frame is there."""

from __future__ import annotations

import time

import pytest
import torch

from ess.comm.delayed import Delayed
from ess.comm.link import LinkLost
from ess.comm.local import local_group
from ess.errors import BadInput

LATENCY_S = 0.2


@pytest.mark.parametrize("is_async", [True, False])
def test_frames_arrive_late_and_in_order(is_async: bool) -> None:
    first, second = local_group(2)
    over = Delayed(first.next, LATENCY_S, 1e9, is_async=is_async)
    begun_s = time.monotonic()
    over.send(b"a", torch.ones(3))
    over.send(b"b")
    over.flush()
    assert time.monotonic() - begun_s >= LATENCY_S * (1 if is_async else 2)
    assert second.previous.receive(5).tensor.equal(torch.ones(3))
    assert second.previous.receive(5).head == b"b"
    over.close()
    with pytest.raises(LinkLost, match="has left"):
        second.previous.receive(5)


def test_a_frame_occupies_the_line() -> None:
    first, _ = local_group(2)
    over = Delayed(first.next, 0.0, 4000.0)
    begun_s = time.monotonic()
    for _ in range(2):
        over.send(b"", torch.ones(100))
    over.flush()
    assert time.monotonic() - begun_s >= 0.2
    assert over.receive() is None
    assert over.restore() is first.next


def test_an_asynchronous_send_does_not_wait() -> None:
    """Nothing has arrived when it returns: a link that waited would have delivered the frame."""
    first, second = local_group(2)
    over = Delayed(first.next, 1.0, 1e9)
    over.send(b"a")
    assert second.previous.receive() is None
    over.flush()
    assert second.previous.receive().head == b"a"
    over.close()


def test_a_loss_on_the_way_reaches_the_sender() -> None:
    first, second = local_group(2)
    over = Delayed(first.next, 0.0, 1e9)
    second.fail("stage 1 has burnt down")
    over.send(b"")
    with pytest.raises(LinkLost, match="burnt down"):
        over.flush()
    with pytest.raises(LinkLost, match="burnt down"):
        over.close()


def test_a_line_that_is_none() -> None:
    first, _ = local_group(2)
    with pytest.raises(BadInput, match="bytes_per_s is 0"):
        Delayed(first.next, 0.0, 0.0)
