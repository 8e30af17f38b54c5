"""What steps of a device took, by clocks that the tests turn: run by test_doors.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ess.door.device.steps import stopwatch
from ess.flashtrans.mover import PreparedCopies
from ess.kernels.cuda.streams import CudaEvent
from tests.door_device.doors import LAYOUT
from tests.door_device.played import Inputs, made, step  # noqa: F401  a fixture

COPY_NS, WAIT_NS = 1000, 70
LAYERS = range(LAYOUT.layer_total)


@pytest.fixture
def clock(monkeypatch):
    """Only copies of the lane and waits of compute take time."""
    now_ns, moments = [0], {}
    record, hold, queue = CudaEvent.record, CudaEvent.hold, PreparedCopies.queue

    def recorded(event, stream, **options):
        moments[event.handle] = now_ns[0]
        return record(event, stream, **options)

    def held(event, stream):
        now_ns[0] += WAIT_NS
        return hold(event, stream)

    def queued(copies, stream, **options):
        now_ns[0] += COPY_NS
        return queue(copies, stream, **options)

    monkeypatch.setattr(CudaEvent, "record", recorded)
    monkeypatch.setattr(CudaEvent, "hold", held)
    monkeypatch.setattr(PreparedCopies, "queue", queued)
    since = lambda event, base: moments[event.handle] - moments[base.handle]  # noqa: E731
    monkeypatch.setattr(CudaEvent, "ns_since", since)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("style", "part_count"), [("whole", 1), ("halves", 2)])
def test_one_step_of_many_is_timed(made, style, part_count):  # noqa: F811
    doors = made(chunks=3, seed=11)
    pairs = [doors.open(list(range(n, 2 * n))) for n in (70, 90)]
    moved = [np.zeros(LAYOUT.group_count, np.int64)]
    for _turn in range(stopwatch.FIRST_TIMED + 2):
        assert not doors.device.stats().fetch_count.any()
        step(doors, pairs, [2, 2], style, [1, 2])
        doors.drain()
        moved.append(doors.host.stats().moved_bytes)
    stats = doors.device.stats()
    np.testing.assert_array_equal(stats.fetch_count, [part_count for _ in LAYERS])
    np.testing.assert_array_equal(stats.transfer_ns, stats.fetch_count * COPY_NS)
    if style == "whole":  # of two halves the later one's wait may do for both
        np.testing.assert_array_equal(stats.exposed_ns, stats.fetch_count * WAIT_NS)
    assert (stats.exposed_ns > 0).all()
    np.testing.assert_array_equal(stats.hidden_ns, stats.transfer_ns - stats.exposed_ns)
    timed = moved[stopwatch.FIRST_TIMED + 1] - moved[stopwatch.FIRST_TIMED]
    assert timed.any()
    np.testing.assert_array_equal(stats.moved_bytes, timed)
    followers = {layer for group in LAYOUT.groups for layer in group[1:]}
    assert {*np.flatnonzero(stats.ahead_count).tolist()} == followers


def test_a_trace_times_every_step_and_every_replay(made):  # noqa: F811
    """By the emulated driver's own clock, whose moments a replay records again."""
    doors = made(chunks=3, seed=12)
    doors.device.timings.keeps_spans = True
    pairs = [doors.open(list(range(n, 2 * n))) for n in (70, 90)]
    inputs, graph, recording = Inputs(doors), torch.cuda.CUDAGraph(), None
    for turn in range(5):
        here = doors.host.begin([pair[0] for pair in pairs], query_counts=[2, 2])
        away = doors.device.begin([pair[1] for pair in pairs], query_counts=[2, 2])
        stats = doors.device.stats()
        assert stats.fetch_count.tolist() == [turn for _ in LAYERS]
        assert len(doors.device.timings.spans) == turn * LAYOUT.layer_total
        inputs.draw(doors, here)
        if turn < 2:
            inputs.run(away)
        elif recording is None:
            with torch.cuda.graph(graph):
                inputs.run(away)
                recording = away.record()
            graph.replay()
        else:
            away.replay(recording)
            graph.replay()
        doors.seal((here, away), [1, 2])
        doors.learn()
        doors.compare()
        assert all(start_ns < end_ns for _, start_ns, end_ns in doors.device.timings.spans)
    doors.audit()


def test_no_step_is_timed_before_the_last_one_was_read(made, monkeypatch):  # noqa: F811
    doors = made(chunks=6, seed=13)
    doors.device.timings.keeps_spans = True
    pairs = [doors.open(list(range(n, 2 * n))) for n in (70, 33)]
    watch = doors.device.stopwatch
    monkeypatch.setattr(watch._ended, "done", lambda: False)
    for _turn in range(3):
        step(doors, pairs, [1, 1], "whole", [1, 1])
        assert not doors.device.stats().fetch_count.any()
    monkeypatch.undo()
    doors.drain()
    step(doors, pairs, [1, 1], "whole", [1, 1])
    np.testing.assert_array_equal(doors.device.stats().fetch_count, [1 for _ in LAYERS])
