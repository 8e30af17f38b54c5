"""Two ports, true pools on both sides: prompts go over bit for bit, whatever the network does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from ess.door import Sequence as Opened
from ess.door.handoff.endings import Landed, Missed
from ess.door.handoff.port import Port
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.transfer.runs import Region
from ess.transfer.transport import Transport
from ess.transfer.transports.faulty import Fault, FaultyTransport
from ess.transfer.transports.shared import SharedTransport
from tests.handoff.layout import LAYOUT
from tests.handoff.receiving import (
    GUARD_S,
    KINDS,
    SEAL,
    Ends,
    content,
    fill,
    offload_of,
    windows_of,
)
from tests.support.manual_clock import ManualClock

TOKENS = tuple(range(300))
FAULTS = [fault for fault in Fault if fault is not Fault.CUT]


class Worker:
    def __init__(
        self, transport: Transport, clock: ManualClock, *, layout: ModelLayout = LAYOUT, **more
    ) -> None:
        self.layout = layout
        self.offload = offload_of(layout, shared=isinstance(transport, SharedTransport))
        self.transport = transport
        self.port = Port(self.offload, transport, SEAL, clock=clock, **more)
        self.came: list[Landed | Missed] = []
        self.left: list = []

    def pump(self) -> None:
        self.port.pump()
        self.port.check()
        self.came += self.port.receiver.outcomes()
        self.left += self.port.sender.outcomes()

    def give(self, uid: int, tokens: tuple[int, ...] = TOKENS, *, salt: bytes = b"") -> Opened:
        """A prompt that is made here, offered and told chunk by chunk; the next pump sends it."""
        sequence = self.offload.open(list(tokens), salt=salt)
        self.port.sender.offer(uid, sequence, prompt=list(tokens), salt=salt)
        fill(sequence, seed=tokens[0])
        for stop in (100, len(tokens) - 1):
            for layer in range(self.layout.layer_total):
                self.port.sender.made(uid, layer, stop)
                self.pump()
        self.port.sender.finish(uid, windows_of(len(tokens) - 1, self.layout))
        return sequence

    def want(self, uid: int, peer: int, tokens: tuple[int, ...] = TOKENS, **more) -> Opened:
        sequence = self.offload.open(list(tokens), on_device=False, **more)
        self.port.receiver.expect(sequence, uid=uid, peer=peer)
        return sequence


class Two:
    def __init__(self, kind: str, *, wrap: Callable | None = None, **more) -> None:
        self.clock = ManualClock()
        self.ends = Ends(kind, self.clock)
        first = self.ends.end()
        first = first if wrap is None else wrap(first, self.clock)
        self.prefill = Worker(first, self.clock, **more)
        self.decode = Worker(self.ends.end(), self.clock, **more)
        self.meet()

    @property
    def workers(self) -> tuple[Worker, Worker]:
        return self.prefill, self.decode

    def meet(self) -> None:
        self.prefill.port.meet(self.decode.port.metadata())
        self.decode.port.meet(self.prefill.port.metadata())

    def turn(self, until: Callable[[], bool], *, advance_s: float = 0.0) -> None:
        guard_s = time.monotonic() + GUARD_S
        while not until():
            assert time.monotonic() < guard_s, (self.prefill.port.counts, self.decode.came)
            self.clock.advance(advance_s)
            for worker in self.workers:
                worker.pump()

    def check(self) -> None:
        for worker in self.workers:
            worker.port.check()
            worker.offload.check()

    def close(self) -> None:
        for worker in self.workers:
            worker.port.close()
        self.check()


@contextmanager
def two(kind: str, **more) -> Iterator[Two]:
    made = Two(kind, **more)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[Two]:
    with two(request.param) as made:
        yield made


def expected(tokens: tuple[int, ...] = TOKENS) -> tuple[bytes, bytes]:
    """What `give` fills in."""
    sequence = offload_of().open(list(tokens))
    fill(sequence, seed=tokens[0])
    return content(sequence)


def text_of(uid: int) -> tuple[int, ...]:
    return (uid, *TOKENS[1:])


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_prompt_goes_over_bit_for_bit(pair: Two, first: str) -> None:
    if first == "prefill":
        pair.prefill.give(7)
    opened = pair.decode.want(7, pair.prefill.port.epoch)
    if first == "decode":
        pair.turn(lambda: len(pair.prefill.port.sender._orphans) == 1)
        pair.prefill.give(7)
    assert pair.decode.port.is_busy
    pair.turn(lambda: bool(pair.decode.came and pair.prefill.left))
    (landed,) = pair.decode.came
    assert isinstance(landed, Landed)
    assert content(opened) == expected()
    opened.resume()
    opened.warm_from(*landed.windows)
    opened.fill()
    assert [pair.decode.offload.verify(layer) for layer in range(4)] == [[]] * 4
    pair.turn(lambda: not any(worker.port.is_busy for worker in pair.workers))
    sent, got = (worker.port.counts for worker in pair.workers)
    assert (sent.sent_count, sent.lapsed_count, got.landed_count, got.missed_count) == (1, 0, 1, 0)
    assert (sent.sent_bytes, got.again_count, got.refused_count) == (got.received_bytes, 0, 0)
    pair.check()


def test_only_what_is_not_cached_goes_over(pair: Two) -> None:
    for uid, page_count in ((1, 5), (2, 2)):
        pair.prefill.give(uid)
        opened = pair.decode.want(uid, pair.prefill.port.epoch)
        before = pair.decode.port.counts.received_bytes
        pair.turn(lambda uid=uid: len(pair.decode.came) == len(pair.prefill.left) == uid)
        size = pair.decode.port.counts.received_bytes - before
        paged = page_count * LAYOUT.host_page_bytes
        assert paged < size < paged + 1000
        assert content(opened) == expected()
        opened.close()
    pair.check()


def test_rows_of_another_text_or_salt_do_not_come(pair: Two) -> None:
    pair.prefill.give(1)
    pair.prefill.give(2, salt=b"a")
    pair.prefill.give(3)
    peer = pair.prefill.port.epoch
    pair.decode.want(1, peer, (*TOKENS[:50], 9, *TOKENS[51:]))
    pair.decode.want(2, peer, salt=b"b")
    pair.decode.want(3, peer, TOKENS[:-1])
    pair.turn(lambda: len(pair.decode.came) == 3)
    assert [type(outcome) for outcome in pair.decode.came] == [Missed] * 3
    assert all("refuses it: wrong text" in missed.sentence for missed in pair.decode.came)
    assert pair.decode.port.counts.received_bytes == 0
    pair.check()


def test_prompts_go_both_ways_at_once(pair: Two) -> None:
    opened = {}
    for giver, taker, uid in ((*pair.workers, 1), (*pair.workers[::-1], 2)):
        giver.give(uid, text_of(uid))
        opened[uid] = taker.want(uid, giver.port.epoch, text_of(uid))
    pair.turn(lambda: all(worker.came and worker.left for worker in pair.workers))
    for uid, sequence in opened.items():
        assert content(sequence) == expected(text_of(uid))
    pair.check()


def test_given_up_in_the_middle_both_sides_are_rid_of_it(pair: Two) -> None:
    free = [worker.offload._pools.latent.free_count for worker in pair.workers]
    opened = pair.decode.want(5, pair.prefill.port.epoch)
    sequence = pair.prefill.offload.open(list(TOKENS))
    pair.prefill.port.sender.offer(5, sequence, prompt=list(TOKENS), salt=b"")
    fill(sequence, seed=0)
    for layer in range(2):
        pair.prefill.port.sender.made(5, layer, 200)
    pair.turn(lambda: pair.decode.port.counts.received_bytes > 0)
    pair.decode.port.receiver.give_up(5)
    opened.close()
    pair.turn(lambda: bool(pair.prefill.left))
    pair.prefill.port.sender.finish(5, None)
    pair.turn(lambda: not any(worker.port.is_busy for worker in pair.workers))
    left = [worker.offload._pools.latent.free_count for worker in pair.workers]
    assert left == free
    assert pair.decode.came == []
    pair.check()


def test_a_sender_that_gives_up_is_heard_at_once(pair: Two) -> None:
    opened = pair.decode.want(5, pair.prefill.port.epoch)
    sequence = pair.prefill.offload.open(list(TOKENS))
    pair.prefill.port.sender.offer(5, sequence, prompt=list(TOKENS), salt=b"")
    pair.turn(lambda: pair.decode.port.receiver._entries[5].legs[0].is_answered)
    pair.prefill.port.sender.give_up(5)
    sequence.close()
    pair.turn(lambda: bool(pair.decode.came))
    assert "given up (aborted)" in pair.decode.came[0].sentence
    opened.close()
    pair.check()


def test_a_successor_of_a_killed_sender_serves() -> None:
    with two("tcp") as pair:
        old = pair.prefill
        first = pair.decode.want(5, old.port.epoch)
        pair.turn(lambda: len(old.port.sender._orphans) == 1)
        old.port.close()
        pair.prefill = Worker(pair.ends.end(), pair.clock)
        pair.turn(lambda: bool(pair.decode.came))
        assert "is lost" in pair.decode.came.pop().sentence
        pair.meet()
        assert [line.epoch for line in pair.decode.port.peers()] == [pair.prefill.port.epoch]
        pair.prefill.give(5)
        pair.decode.port.receiver.expect(first, uid=5, peer=pair.prefill.port.epoch)
        pair.turn(lambda: bool(pair.decode.came))
        assert isinstance(pair.decode.came[0], Landed)
        assert content(first) == expected()
        pair.check()


def test_a_killed_receiver_is_forgotten_and_its_handoff_ends() -> None:
    """A port that counts lost peers would after some restarts meet none."""
    with two("tcp") as pair:
        pair.decode.want(5, pair.prefill.port.epoch)
        pair.turn(lambda: len(pair.prefill.port.sender._orphans) == 1)
        sequence = pair.prefill.offload.open(list(TOKENS))
        pair.prefill.port.sender.offer(5, sequence, prompt=list(TOKENS), salt=b"")
        pair.decode.port.close()
        pair.decode = Worker(pair.ends.end(), pair.clock)
        pair.turn(lambda: not pair.prefill.port.peers())
        (lapsed,) = pair.prefill.left
        assert "is lost" in lapsed.sentence
        pair.prefill.port.sender.finish(5, None)
        pair.turn(lambda: not pair.prefill.port.is_busy)


def test_to_meet_again_changes_nothing_but_when_it_was_heard(pair: Two) -> None:
    pair.prefill.give(1)
    pair.decode.want(1, pair.prefill.port.epoch)
    pair.clock.advance(2)
    (line,) = pair.decode.port.peers()
    assert line.heard_s_ago == 2
    pair.meet()
    assert [line.heard_s_ago for line in pair.decode.port.peers()] == [0]
    pair.turn(lambda: bool(pair.decode.came))
    assert isinstance(pair.decode.came[0], Landed)


def test_a_peer_of_another_deployment_is_not_met(pair: Two) -> None:
    with pytest.raises(BadInput):
        pair.decode.port.meet(b"no metadata")
    assert len(pair.decode.port.peers()) == 1


def unreliable(seed: int, odds: float) -> Callable:
    def wrapped(inner: Transport, clock: ManualClock) -> FaultyTransport:
        scratch = Region(99, np.zeros(1 << 20, np.uint8))
        inner.register([scratch])
        listed = dict.fromkeys(FAULTS, odds)
        return FaultyTransport(inner, clock=clock, odds=listed, scratch=scratch, seed=seed)

    return wrapped


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_over_a_bad_network_all_lands_or_nothing_does(kind: str, seed: int) -> None:
    with two(kind, wrap=unreliable(seed, 0.07), lease_s=200.0, wait_s=60.0) as pair:
        peer = pair.prefill.port.epoch
        opened = {uid: pair.decode.want(uid, peer, text_of(uid)) for uid in (1, 2, 3)}
        for uid in opened:
            pair.prefill.give(uid, text_of(uid))
        pair.turn(lambda: len(pair.decode.came) == 3, advance_s=0.1)
        landed = [outcome for outcome in pair.decode.came if isinstance(outcome, Landed)]
        for outcome in landed:
            assert content(opened[outcome.uid]) == expected(text_of(outcome.uid))
        assert sum(pair.prefill.transport.injected.values()) > 3
        pair.check()
        if kind != "tcp":
            assert len(landed) == 3, pair.decode.came
