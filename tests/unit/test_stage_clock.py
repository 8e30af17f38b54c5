"""The pipeline on a virtual clock: closed forms, and a slow simulation that counts every tick."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ess.comm.link import AHEAD_MAX, HELD_MAX
from ess.engine.chunking.sizes import PrefillTime
from ess.errors import BadInput
from ess.sim.prefill.pipeline import Pipeline, prefill
from ess.sim.prefill.stage_clock import Links, clocked


@dataclass
class Worker:
    """A stage, tick by tick: idle, computing, wanting to send, or waiting for the peer."""

    held: deque[int] = field(default_factory=deque)
    computing: tuple[int, int] | None = None
    to_send: int | None = None
    waits_for: int | None = None
    ended: list[int] = field(default_factory=list)


@dataclass
class Wire:
    """Frames that wait to be sent, the frame that is being sent with the tick of its end, and
    frames under way."""

    queue: deque[int] = field(default_factory=deque)
    moving: tuple[int, int] | None = None
    in_air: deque[tuple[int, int]] = field(default_factory=deque)
    sent_count: int = 0
    taken_count: int = 0


class Ticks:
    """Whole ticks; within one, whatever can happen happens, until nothing more does."""

    def __init__(self, seconds, under_way_max, latency, cost, is_async) -> None:
        self.seconds, self.under_way_max = seconds, under_way_max
        self.latency, self.cost, self.is_async = latency, cost, is_async
        self.workers = [Worker() for _ in seconds[0]]
        self.wires = [Wire() for _ in seconds[0][1:]]
        self.began_count = 0
        self.now = 0

    def run(self) -> list[int]:
        last = self.workers[-1]
        while len(last.ended) < len(self.seconds):
            while self.admit() or any(map(self.move, range(len(self.workers)))):
                pass
            self.now += 1
            assert self.now < 100_000, "it does not end"
        return last.ended

    def admit(self) -> bool:
        """The lead begins the next chunk when it knows that few enough are under way."""
        first, delay = self.workers[0], self.latency if len(self.workers) > 1 else 0
        known = sum(at + delay <= self.now for at in self.workers[-1].ended)
        is_free = first.computing is None and first.to_send is None and first.waits_for is None
        is_next = self.began_count < len(self.seconds) and not first.held
        if not (is_free and is_next and self.began_count - known < self.under_way_max):
            return False
        first.held.append(self.began_count)
        self.began_count += 1
        return True

    def move(self, number: int) -> bool:
        return self.compute(number) or (number < len(self.wires) and self.carry(number))

    def compute(self, number: int) -> bool:
        worker = self.workers[number]
        if worker.computing is not None:
            chunk, until = worker.computing
            if until > self.now:
                return False
            worker.computing = None
            worker.ended.append(self.now)
            worker.to_send = chunk if number < len(self.wires) else None
            return True
        if worker.to_send is not None:
            wire = self.wires[number]
            if wire.sent_count - wire.taken_count >= AHEAD_MAX:
                return False
            wire.queue.append(worker.to_send)
            wire.sent_count += 1
            worker.to_send, worker.waits_for = None, None if self.is_async else wire.sent_count
            return True
        if worker.waits_for is not None:
            if self.wires[number].taken_count < worker.waits_for:
                return False
            worker.waits_for = None
            return True
        if not worker.held:
            return False
        chunk = worker.held.popleft()
        worker.computing = chunk, self.now + self.seconds[chunk][number]
        return True

    def carry(self, number: int) -> bool:
        wire, peer = self.wires[number], self.workers[number + 1]
        if wire.moving is not None and wire.moving[1] <= self.now:
            wire.in_air.append((wire.moving[0], self.now + self.latency))
            wire.moving = None
            return True
        if wire.in_air and wire.in_air[0][1] <= self.now:
            peer.held.append(wire.in_air.popleft()[0])
            wire.taken_count += 1
            return True
        coming = len(wire.in_air) + (wire.moving is not None)
        has_room = len(peer.held) + coming < HELD_MAX
        if wire.moving is None and wire.queue and has_room:
            chunk = wire.queue.popleft()
            wire.moving = chunk, self.now + self.cost[chunk]
            return True
        return False


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_it_agrees_with_a_simulation_of_every_tick(drawn):
    stages, chunks = drawn.draw(st.integers(1, 5)), drawn.draw(st.integers(1, 12))
    row = st.lists(st.integers(0, 9), min_size=stages, max_size=stages)
    seconds = drawn.draw(st.lists(row, min_size=chunks, max_size=chunks))
    seconds[0][0] = 1
    cost = drawn.draw(st.lists(st.integers(0, 12), min_size=chunks, max_size=chunks))
    latency, under_way_max = drawn.draw(st.integers(0, 6)), drawn.draw(st.integers(1, 8))
    is_async = drawn.draw(st.booleans())
    ran = clocked(
        seconds,
        under_way_max=under_way_max,
        links=Links(latency_s=latency, bytes_per_s=1.0, is_async=is_async),
        sent_bytes=cost,
    )
    assert list(ran.ended_s) == Ticks(seconds, under_way_max, latency, cost, is_async).run()


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("chunks", [1, 3, 16, 100])
def test_equal_stages_and_chunks_have_the_textbook_bubble(stages, chunks):
    ran = clocked([[0.5] * stages] * chunks, under_way_max=stages + 2)
    assert ran.bubble_share == pytest.approx((stages - 1) / (stages - 1 + chunks))
    assert ran.span_s == pytest.approx(0.5 * (stages - 1 + chunks))
    assert 0.5 * stages * chunks / ran.span_s == pytest.approx(ran.efficiency * stages)


def test_it_is_the_simulator_s_pipeline_where_links_take_no_time():
    """Many chunks of many lengths; the simulator knows no bounds on what waits between stages."""
    time, rand = PrefillTime(quadratic=2e-9, linear=5e-5), random.Random(4)
    pipeline = Pipeline.of_layers(layers=61, stages=2, chunk_overhead_s=0.01)
    sizes = [rand.randrange(1024, 4096) for _ in range(12)]
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    seconds = [
        [time.of(size, after=start) * share + 0.01 for share in pipeline.shares]
        for size, start in zip(sizes, starts, strict=True)
    ]
    ran = clocked(seconds, under_way_max=100)
    assert ran.span_s == pytest.approx(prefill(time, pipeline, sizes).ttft_s, rel=0.01)
    assert ran.busy_s[1] == pytest.approx(prefill(time, pipeline, sizes).busy_s)


def test_one_chunk_at_a_time_takes_the_sum_of_all_and_of_all_ways():
    ran = clocked([[1, 2, 3]] * 4, under_way_max=1, links=Links(latency_s=0.5))
    assert ran.span_s == 4 * (6 + 2 * 0.5) + 3 * 0.5
    assert clocked([[1], [2]], under_way_max=1, links=Links(latency_s=9)).ended_s == (1, 3)


def test_asynchronous_sends_hide_the_way_and_synchronous_ones_pay_it_each_time():
    """4 stages, 20 chunks of 1 s, 0.4 s on the way: the way is in the fill, or in every chunk."""
    chunks = [[1.0] * 4] * 20
    slow = {"latency_s": 0.1, "bytes_per_s": 10.0}
    hidden = clocked(chunks, under_way_max=8, links=Links(**slow), sent_bytes=[3] * 20)
    paid = clocked(
        chunks, under_way_max=8, links=Links(**slow, is_async=False), sent_bytes=[3] * 20
    )
    assert hidden.span_s == pytest.approx(20 + 3 * 1.4)
    assert paid.span_s == pytest.approx(20 * 1.4 - 0.4 + 3 * 1.4)


def test_a_link_slower_than_the_stages_sets_the_pace():
    ran = clocked(
        [[1.0, 1.0]] * 50, under_way_max=99, links=Links(bytes_per_s=1.0), sent_bytes=[4] * 50
    )
    assert ran.span_s == pytest.approx(1 + 50 * 4 + 1)


@pytest.mark.parametrize(
    ("seconds", "wishes", "says"),
    [
        ([], {}, "a chunk and a stage"),
        ([[]], {}, "a chunk and a stage"),
        ([[1, 2], [1]], {}, r"chunk 1 took \[1\]: .* each of 2 stages"),
        ([[1, -1]], {}, r"chunk 0 took \[1, -1\]"),
        ([[1, math.nan]], {}, "chunk 0 took"),
        ([[0, 0]], {}, "1 chunks took no time"),
        ([[1]], {"under_way_max": 0}, "under_way_max is 0"),
        ([[1]], {"sent_bytes": [1, 2]}, "2 sizes for 1 chunks"),
        ([[1]], {"sent_bytes": [-1]}, "1 sizes for 1 chunks"),
    ],
)
def test_times_that_cannot_be_are_refused(seconds, wishes, says):
    with pytest.raises(BadInput, match=says):
        clocked(seconds, **{"under_way_max": 4, **wishes})


@pytest.mark.parametrize("wrong", [{"latency_s": -1}, {"bytes_per_s": 0}, {"latency_s": math.nan}])
def test_links_that_cannot_be_are_refused(wrong):
    with pytest.raises(BadInput, match="links of"):
        Links(**wrong)
