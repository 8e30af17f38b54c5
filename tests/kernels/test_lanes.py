"""Copy lanes: one contract, three implementations, and what only threads can get wrong."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ess.errors import BadInput, BadState
from ess.flashtrans import InlineLane, WorkerLane, copy_rows, open_lane
from ess.flashtrans.lanes import DoneEvent
from ess.flashtrans.views import known
from ess.kernels.cpu import native
from ess.kernels.streams import Event, Lane, RowCopy
from tests.support.built import needs_native
from tests.support.manual_lane import ManualLane

Bytes = npt.NDArray[np.uint8]

MAKERS: dict[str, Callable[[], Lane]] = {
    "inline": InlineLane,
    "manual": ManualLane,
    "worker": lambda: WorkerLane(threads=2),
    "at once": lambda: WorkerLane(at_once_bytes=64 << 10),
}


@pytest.fixture(params=list(MAKERS))
def lane(request: pytest.FixtureRequest) -> Iterator[Lane]:
    if request.param in ("worker", "at once") and not native.available():
        pytest.skip("ess._native is not built")
    made = MAKERS[request.param]()
    yield made
    made.close()


def rows(count: int, seed: int = 0, row_bytes: int = 656) -> Bytes:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 200, (count, row_bytes), dtype=np.uint8)


def zeros(count: int) -> Bytes:
    return np.zeros((count, 656), np.uint8)


# The contract


def test_a_job_of_several_copies_has_one_event(lane: Lane) -> None:
    pool, slots, stored = rows(50), zeros(20), zeros(50)
    wanted, free = np.array([7, 3, -1, 49]), np.array([0, 19, 5, 4], np.int32)
    event = lane.submit(
        [
            RowCopy(source=pool, source_rows=wanted, target=slots, target_rows=free),
            RowCopy(source=slots, source_rows=free[:2].copy(), target=stored[:2]),
        ]
    )
    event.wait()
    assert event.done()
    assert np.array_equal(slots[[0, 19, 4]], pool[[7, 3, 49]])
    assert np.array_equal(stored[:2], pool[[7, 3]])
    assert (slots[5] == 0).all()
    assert event.started_ns <= event.finished_ns


def test_jobs_run_in_order(lane: Lane) -> None:
    chain = [rows(30)] + [zeros(30) for _ in range(40)]
    events = [
        lane.submit([RowCopy(source=source, target=target)])
        for source, target in itertools.pairwise(chain)
    ]
    events[-1].wait(30.0)
    assert all(event.done() for event in events)
    assert np.array_equal(chain[-1], chain[0])
    ends = [event.finished_ns for event in events]
    assert ends == sorted(ends)


def test_lists_may_be_reused_at_once(lane: Lane) -> None:
    pool, target, wanted = rows(60), zeros(10), np.arange(10)
    event = lane.submit([RowCopy(source=pool, source_rows=wanted, target=target)])
    wanted[:] = 59
    event.wait()
    assert np.array_equal(target, pool[:10])


def test_a_mark_covers_what_was_submitted(lane: Lane) -> None:
    lane.mark().wait(60.0)
    targets = [zeros(40) for _ in range(5)]
    for target in targets:
        lane.submit([RowCopy(source=rows(40), target=target)])
    lane.mark().wait()
    assert all(np.array_equal(target, rows(40)) for target in targets)


def test_an_empty_job_is_a_job(lane: Lane) -> None:
    event = lane.submit([])
    event.wait(60.0)
    assert event.done()


def test_one_wrong_copy_refuses_the_job(lane: Lane) -> None:
    pool, first, second = rows(8), zeros(8), zeros(8)
    outside = np.array([0, 1, 2, 3, 4, 5, 6, 8])
    with pytest.raises(BadInput, match=r"source_rows\[7\] is 8"):
        lane.submit(
            [
                RowCopy(source=pool, target=first),
                RowCopy(source=pool, source_rows=outside, target=second),
            ]
        )
    lane.mark().wait()
    assert not first.any()
    assert not second.any()
    lane.submit([RowCopy(source=pool, target=first)]).wait()
    assert np.array_equal(first, pool)


def test_close_finishes_what_was_submitted(lane: Lane) -> None:
    targets = [zeros(2000) for _ in range(8)]
    source = rows(2000)
    events = [lane.submit([RowCopy(source=source, target=target)]) for target in targets]
    lane.close()
    lane.close()
    assert all(np.array_equal(target, source) for target in targets)
    for event in events:
        event.wait(0.0)
        assert event.done()
    with pytest.raises(BadState, match="closed"):
        lane.submit([])


# The worker thread


@needs_native
def test_times_are_monotonic_and_only_known_when_done() -> None:
    before_ns = time.monotonic_ns()
    with WorkerLane() as worker:
        events = [worker.submit([RowCopy(source=rows(500), target=zeros(500))]) for _ in range(10)]
        worker.mark().wait()
    after_ns = time.monotonic_ns()
    ends = [t for event in events for t in (event.started_ns, event.finished_ns)]
    assert [before_ns, *ends, after_ns] == sorted([before_ns, *ends, after_ns])


@needs_native
def test_a_wait_that_runs_out_of_time() -> None:
    """Jobs of 64 MiB keep the worker busy for longer than it takes to ask."""
    big, target = np.ones((100_000, 656), np.uint8), np.zeros((100_000, 656), np.uint8)
    with WorkerLane() as worker:
        events = [worker.submit([RowCopy(source=big, target=target)]) for _ in range(6)]
        with pytest.raises(TimeoutError, match=r"copy job 6 is not done after 0\.0 s"):
            events[-1].wait(0.0)
        with pytest.raises(BadState, match="no times yet"):
            _ = events[-1].started_ns
        assert not events[-1].done()
        events[-1].wait(60.0)


@needs_native
def test_many_threads_submit_and_wait() -> None:
    pool, wrong = rows(400), []

    def submitter(seed: int) -> None:
        rng = np.random.default_rng(seed)
        target = zeros(64)
        for _ in range(60):
            wanted = rng.integers(0, 400, 64)
            worker.submit([RowCopy(source=pool, source_rows=wanted, target=target)]).wait(30.0)
            if not np.array_equal(target, pool[wanted]):
                wrong.append(seed)

    with WorkerLane() as worker:
        threads = [threading.Thread(target=submitter, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert worker.completed() == 4 * 60
    assert wrong == []


@needs_native
def test_the_gil_is_free_while_waiting() -> None:
    """With a switch interval of an hour the other thread runs only if wait() lets go."""
    source, turns, stop = rows(20_000), [0], threading.Event()

    def other() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=other)
    sys.setswitchinterval(3600)
    try:
        thread.start()
        with WorkerLane() as worker:
            target = np.zeros_like(source)
            for _ in range(1000):
                event = worker.submit([RowCopy(source=source, target=target)])
                before = turns[0]
                event.wait()
                if turns[0] > before:
                    return
        pytest.fail("wait() held the GIL")
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        thread.join()


@needs_native
def test_dropping_a_busy_lane_loses_nothing() -> None:
    source, targets = rows(3000), [zeros(3000) for _ in range(6)]
    worker = WorkerLane()
    for target in targets:
        worker.submit([RowCopy(source=source, target=target)])
    del worker
    gc.collect()
    assert all(np.array_equal(target, source) for target in targets)


@needs_native
def test_pending_jobs_keep_their_matrices_and_finished_ones_do_not() -> None:
    class Owned(np.ndarray[Any, Any]):
        """An array that can be watched."""

    def temporary() -> Owned:
        return rows(40_000, seed=4).view(Owned)

    source = temporary()
    watched = weakref.ref(source)
    target = zeros(40_000)
    with WorkerLane() as worker:
        blocker = worker.submit([RowCopy(source=rows(40_000), target=zeros(40_000))])
        event = worker.submit([RowCopy(source=source, target=target)])
        del source
        event.wait()
        assert blocker.done()
        assert watched() is None
    assert np.array_equal(target, rows(40_000, seed=4))


@needs_native
def test_a_forked_child_gets_an_error_and_no_hang() -> None:
    """And may copy with helper threads of its own, though the parent's are not there."""
    source, target = rows(3000), zeros(3000)
    copy_rows(source=source, target=target, threads=2)
    with WorkerLane() as worker:
        event = worker.submit([RowCopy(source=source, target=target)])
        event.wait()
        child = os.fork()
        if child == 0:
            try:
                os._exit(refusals_in_child(worker, event))
            finally:
                os._exit(99)
        assert exit_code(child) == 3
        worker.submit([RowCopy(source=source, target=target)]).wait(60.0)


def refusals_in_child(worker: WorkerLane, event: Event) -> int:
    refused = 0
    for call in (lambda: worker.submit([]), event.wait, event.done):
        try:
            call()
        except BadState:
            refused += 1
    worker.close()
    target = zeros(3000)
    copy_rows(source=rows(3000), target=target, threads=3)
    return refused if np.array_equal(target, rows(3000)) else 98


def exit_code(child: int) -> int:
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hangs")


def test_the_seam_for_other_devices() -> None:
    open_lane(device="cpu").close()
    with pytest.raises(BadInput, match="mps"):
        open_lane(device="mps")
    with pytest.raises(BadInput, match="threads is 0"):
        open_lane(threads=0)


def test_without_the_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    with open_lane() as plain:  # type: ignore[attr-defined]
        assert isinstance(plain, InlineLane)
        target = zeros(8)
        plain.submit([RowCopy(source=rows(8), target=target)]).wait()
    assert np.array_equal(target, rows(8))


# The tests' lane


def test_a_read_before_the_wait_shouts() -> None:
    manual = ManualLane(delay_max=5)
    target = zeros(6)
    event = manual.submit([RowCopy(source=rows(6), source_rows=np.arange(6), target=target)])
    assert (target == 0xFF).all()
    event.wait()
    assert np.array_equal(target, rows(6))


def test_poison_spares_skipped_rows_and_rows_still_to_be_read() -> None:
    manual = ManualLane()
    arena, pool, stored = rows(10, seed=1), rows(20), zeros(2)
    before = arena.copy()
    manual.hold()
    manual.submit([RowCopy(source=arena, source_rows=np.array([2, 5]), target=stored)])
    victims = np.array([5, 7, -1, 0])
    event = manual.submit([RowCopy(source=pool[:4], target=arena, target_rows=victims)])
    assert (arena[[7, 0]] == 0xFF).all()
    assert np.array_equal(arena[[1, 2, 3, 4, 5, 6, 8, 9]], before[[1, 2, 3, 4, 5, 6, 8, 9]])
    manual.release()
    event.wait()
    assert np.array_equal(stored, before[[2, 5]])
    assert np.array_equal(arena[[5, 7, 0]], pool[[0, 1, 3]])


def test_time_passes_in_ticks() -> None:
    def history(seed: int) -> list[int]:
        manual = ManualLane(seed=seed, delay_max=9)
        events = [manual.submit([]) for _ in range(12)]
        counts = []
        while manual.pending_count:
            manual.advance()
            counts.append(manual.pending_count)
        assert [event.finished_ns for event in events] == sorted(
            event.finished_ns for event in events
        )
        return counts

    assert history(1) == history(1)
    assert history(1) != history(2)


def test_polling_a_copy_ends() -> None:
    manual = ManualLane(delay_max=5)
    event = manual.submit([])
    assert sum(1 for _ in range(10) if not event.done()) <= 5
    assert event.done()


def test_a_lane_that_hangs() -> None:
    manual = ManualLane()
    manual.hold()
    event = manual.submit([RowCopy(source=rows(4), target=zeros(4))])
    manual.advance(100)
    assert not event.done()
    with pytest.raises(TimeoutError):
        event.wait(0.1)
    with pytest.raises(BadState, match="for ever"):
        event.wait()
    with pytest.raises(BadState, match="no times"):
        _ = event.finished_ns
    manual.release()
    event.wait()
    assert event.finished_ns >= event.started_ns


def test_a_negative_delay_is_refused() -> None:
    with pytest.raises(BadInput, match="delay_max is -1"):
        ManualLane(delay_max=-1)


@needs_native
def test_a_small_job_is_copied_at_submission_when_nothing_is_under_way() -> None:
    pool, slots = rows(40_000), zeros(40_000)
    small = RowCopy(source=slots[:100], target=zeros(100))
    with WorkerLane(at_once_bytes=100 * 656) as lane:
        first = lane.submit([RowCopy(source=pool[:100], target=slots[:100])])
        assert isinstance(first, DoneEvent)
        assert first.finished_ns > first.started_ns > 0
        assert np.array_equal(slots[:100], pool[:100])
        too_large = lane.submit([RowCopy(source=pool[:101], target=slots[:101])])
        assert not isinstance(too_large, DoneEvent)
        too_large.wait()
        mixed = [lane.submit([RowCopy(source=pool, target=slots)]), lane.submit([small])]
        mixed[1].wait()
        assert mixed[0].done()
        assert mixed[0].finished_ns <= mixed[1].finished_ns
        assert np.array_equal(small.target, pool[:100])
        assert isinstance(lane.submit([small]), DoneEvent)
        lane.mark().wait()


def test_a_known_matrix_is_taken_as_it_was_seen(lane: Lane) -> None:
    pool, slots = rows(50), zeros(20)
    wanted, free = np.array([7, 3]), np.array([0, 19], np.int32)
    lane.submit(
        [RowCopy(source=known(pool), source_rows=wanted, target=known(slots), target_rows=free)]
    ).wait()
    assert np.array_equal(slots[free], pool[wanted])
    with pytest.raises(BadInput, match="source_rows\\[1\\] is 50"):
        lane.submit([RowCopy(source=known(pool), source_rows=np.array([0, 50]), target=slots[:2])])
    pool.flags.writeable = False
    with pytest.raises(BadInput, match="read-only"):
        known(pool)
