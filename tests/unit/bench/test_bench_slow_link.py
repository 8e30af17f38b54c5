"""The slowed lane moves rows late but whole; misses come as forced; prediction is arithmetic."""

from __future__ import annotations

import time

import numpy as np
import pytest

from ess.bench.engine.arms.decode_arm import DecodeArm, DecodeWay, DecodeWork
from ess.bench.engine.arms.forced_misses import Forced
from ess.bench.engine.slow_link import (
    Cell,
    SlowLinkRun,
    agreement_row,
    crossing_rate,
    hiding,
    rows_of,
    shares_of,
)
from ess.bench.harness.measure.slow_lane import TimedLane
from ess.cost import exposed
from ess.errors import BadInput, BadState
from ess.kernels.streams import RowCopy
from tests.unit.bench.test_bench_step import build

ROW = 656


def submit(lane: TimedLane, rows: int = 100):
    source = np.random.default_rng(1).integers(0, 255, (rows, ROW)).astype(np.uint8)
    target = np.zeros_like(source)
    return source, target, lane.submit([RowCopy(source=source, target=target)])


def test_a_paced_job_takes_the_time_of_its_bytes_and_the_next_one_follows_it():
    lane = TimedLane(bytes_per_us=0.0625)
    started = time.monotonic()
    _, _, first = submit(lane)
    source, target, second = submit(lane)
    assert not first.done()
    with pytest.raises(TimeoutError):
        second.wait(0.001)
    second.wait()
    took_ms = (time.monotonic() - started) * 1e3
    assert took_ms >= 2099
    assert first.done()
    assert (source == target).all()
    assert second.started_ns - first.started_ns == 1_049_600_000
    assert second.finished_ns - second.started_ns >= 1_049_600_000
    one, other = lane.take_jobs()
    assert one.byte_count == other.byte_count == 100 * ROW
    assert other.waited_us > 50_000
    assert one.waits_ns == []
    assert lane.take_jobs() == []
    lane.close()
    with pytest.raises(BadState, match="closed"):
        submit(lane)


def test_an_unpaced_lane_is_only_timed_and_its_mark_waits_for_all():
    lane = TimedLane()
    source, target, event = submit(lane)
    mark = lane.mark()
    mark.wait()
    assert event.done()
    assert (source == target).all()
    assert event.finished_ns >= event.started_ns > 0
    with pytest.raises(BadInput, match="rates are above 0"):
        lane.pace(0)
    lane.close()


@pytest.mark.parametrize("mode", ["none", "da", "dba"])
def test_every_request_misses_what_was_forced_and_says_the_same(mode):
    prefix = build(192)
    shape = DecodeWork(context=192, batch=2, mtp=2, steps=6)
    forced, way = Forced(), DecodeWay(name=mode, mode=mode, ratio=1.0)
    arms = [
        DecodeArm(prefix, shape, way, lane=TimedLane(), placement=placement)
        for placement in (None, forced.over)
    ]
    arms[1].offload.drain()
    forced.miss_count = 20
    for _ in range(3):
        for arm in arms:
            arm.step()
            arm.offload.drain()
            arm.offload.check()
    assert arms[0].outputs == arms[1].outputs
    for missed in arms[1].taken.misses:
        assert (missed == 2 * 20).all(), missed
    assert sum(missed.sum() for missed in arms[0].taken.misses) == 0
    for arm in arms:
        arm.close()


def cell(step: float, waited: float = 0.0, window: float = 0.0) -> Cell:
    return Cell(step_us=step, busy_us=50.0, waited_us=waited, window_us=window, fetched=64.0)


def test_windows_and_costs_come_from_runs_at_full_speed():
    fast = {
        "none": cell(1050, waited=50),
        "da": cell(1027, window=300),
        "dba": cell(1060, waited=10, window=500),
    }
    behind = hiding(fast)
    assert (behind.da_cost_us, behind.dba_cost_us) == (27, 50)
    assert (behind.window_us, behind.index_us) == (273, 400)
    assert exposed(400, behind).da == 127
    assert exposed(400, behind).dba == 50
    rate = crossing_rate(fast["da"], 8 * ROW)
    assert 64 * 8 * ROW / rate == pytest.approx(0.75 * 300)


def test_shares_of_the_transfer():
    fast = {"none": cell(1000), "da": cell(1030, window=80), "dba": cell(1000, window=80)}
    slow = {mode: cell(step) for mode, step in (("none", 1050), ("da", 1035), ("dba", 1010))}
    shares = {mode: shares_of(mode, fast, slow) for mode in slow}
    assert shares["none"].measured == shares["none"].predicted == 0
    assert shares["da"].measured == pytest.approx(0.3)
    assert shares["da"].predicted == pytest.approx(0.4), "30 us of splitting, nothing in sight"
    assert shares["dba"].predicted == 1
    row = agreement_row([(fast, slow)])
    assert row.samples == pytest.approx([10, 20])
    assert row.value == pytest.approx(15)


def test_the_benchmark_forces_its_grid_and_compares_with_none():
    plan = SlowLinkRun(context=192, batch=2, misses=(16,), steps=1, top_k=64, bytes_per_us=20.0)
    rows = rows_of(plan, folder=None)
    assert [row.name for row in rows] == [
        *(f"step at 16 misses, {mode}" for mode in ("NONE", "DA", "DBA")),
        "hidden share, measured against predicted",
    ]
    for row in rows[:-1]:
        assert row.config["misses"] == 16
        assert row.config["T_us"] >= 2 * 16 * ROW / 20
