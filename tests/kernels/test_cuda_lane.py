"""The stream lane and the residency of a device, end to end over cuda-python, on an emulated driver.

The driver is a library of our own that does as little as events force it to, so a dependency that
is missing shows as wrong rows. It takes the place of libcuda in a process of its own: run as a
script, this file plays the scenarios, and each test asks for one of them.
"""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest

from ess.errors import BadInput, BadState, Unavailable
from ess.flashtrans.stream_lane import StreamLane
from ess.kernels import native
from ess.kernels.cuda import driver
from ess.kernels.cuda.driver import Device
from ess.kernels.cuda.pinned import pinned_memory, register
from ess.kernels.cuda.residency import Residency, now_of
from ess.kernels.cuda.resolve import ResolveShape
from ess.kernels.cuda.rows import flat_form, move_record
from ess.kernels.cuda.streams import CudaStream
from ess.kernels.memory import host_memory
from ess.kernels.streams import RowCopy
from ess.pool import lru
from ess.pool.arena import Arena, Split
from tests.support import emulated_driver
from tests.support.emulate import needs_compiler
from tests.support.emulated_driver import DeviceTensor

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(
        importlib.util.find_spec("cuda") is None, reason="cuda-bindings is not installed"
    ),
]

ROW_BYTES = 656


class Bench:
    """A pool on the host, a slab on the device, and what both should hold by now."""

    def __init__(self, seed=0, **options):
        self.random = np.random.default_rng(seed)
        self.device = Device()
        self.compute = CudaStream(self.device)
        options = {"list_capacity": 256, "place_bytes": 20_000, "block_count_max": 2} | options
        self.lane = StreamLane(self.device, compute_stream=lambda: self.compute.handle, **options)
        pool = pinned_memory(self.device, 500 * ROW_BYTES, row_bytes=ROW_BYTES, touch_threads=1)
        self.pool = pool.reshape(-1, ROW_BYTES)
        self.pool[:] = self.random.integers(0, 256, self.pool.shape)
        self.slab = np.full((300, ROW_BYTES), 0xEE, np.uint8)
        self.expected = {"pool": self.pool.copy(), "slab": self.slab.copy()}

    def job(self):
        """A fetch or a store of some rows, with pairs to skip, lists of either width, or none."""
        count = int(self.random.choice([0, 1, 30, 70, 150, 290]))
        lists = {
            "pool": self.random.permutation(len(self.pool))[:count],
            "slab": self.random.permutation(len(self.slab))[:count],
        }
        for name, rows in lists.items():
            rows[self.random.random(count) < 0.1] = -1
            lists[name] = rows.astype(self.random.choice([np.int32, np.int64]))
        sides = ("pool", "slab") if self.random.random() < 0.7 else ("slab", "pool")
        self.move(lists, *sides)
        matrix = {"pool": self.pool, "slab": DeviceTensor(self.slab)}
        keywords = {}
        for side, name in zip(("source", "target"), sides, strict=True):
            rows = lists[name]
            if name == "slab" and self.random.random() < 0.2:
                rows = DeviceTensor(rows.astype(np.int32))
            keywords |= {side: matrix[name], f"{side}_rows": rows}
        return RowCopy(**keywords)

    def move(self, lists, source, target):
        kept = (lists[source] >= 0) & (lists[target] >= 0)
        rows = self.expected[source][lists[source][kept]]
        self.expected[target][lists[target][kept]] = rows

    def check(self):
        np.testing.assert_array_equal(self.pool, self.expected["pool"])
        np.testing.assert_array_equal(self.slab, self.expected["slab"])


def jobs_keep_their_order_and_their_rows():
    for seed, way in enumerate(["auto", "flat", "ring", "staged"]):
        bench = Bench(seed, way=way)
        for turn in range(12):
            event = bench.lane.submit([bench.job() for _ in range(bench.random.integers(1, 4))])
            if turn % 3 == 0:
                event.wait(30)
                bench.check()
                assert event.started_ns <= event.finished_ns
        bench.lane.mark().wait(30)
        bench.check()
        bench.lane.close()


def a_job_follows_the_compute_stream_and_compute_follows_the_job():
    bench = Bench(3)
    dense = np.zeros((40, ROW_BYTES), np.uint8)
    slots = np.arange(40, dtype=np.int32)
    for turn in range(15):
        start = bench.slab.__array_interface__["data"][0]
        words = 40 * ROW_BYTES // 4
        driver.call("cuMemsetD32Async", start, turn, words, bench.compute.handle)
        store = RowCopy(
            source=DeviceTensor(bench.slab),
            source_rows=slots,
            target=bench.pool,
            target_rows=slots + 100,
        )
        fetch = RowCopy(
            source=bench.pool,
            source_rows=slots + turn,
            target=DeviceTensor(bench.slab),
            target_rows=slots + 200,
        )
        bench.lane.submit([store, fetch]).hold(bench.compute.handle)
        move_on(bench, bench.slab[200:240], dense)
        bench.compute.synchronize()
        assert (bench.pool[100:140].view(np.int32) == turn).all(), turn
        np.testing.assert_array_equal(dense, bench.pool[turn : turn + 40])


def move_on(bench, source, target):
    """As compute would read what was fetched."""
    form = flat_form(ROW_BYTES)
    record = move_record(
        source=source.__array_interface__["data"][0],
        source_stride=ROW_BYTES,
        target=target.__array_interface__["data"][0],
        target_stride=ROW_BYTES,
        pair_count=len(source),
    )
    kernel = bench.device.kernel(form.program, form.entry)
    kernel.launch(record, blocks=1, threads=form.threads, stream=bench.compute.handle)


def refusals_name_what_is_wrong_and_change_nothing():
    bench = Bench(1)
    slab, rows = DeviceTensor(bench.slab), np.arange(4)
    stray = np.zeros((10, ROW_BYTES), np.uint8)
    wrong = {
        "cannot reach": RowCopy(source=stray, source_rows=rows, target=slab, target_rows=rows),
        "neither": RowCopy(source=bench.pool, source_rows=rows, target=stray, target_rows=rows),
        r"source_rows\[3\] is 500": RowCopy(
            source=bench.pool, source_rows=rows + 497, target=slab, target_rows=rows
        ),
        r"int64, must be int32 on a device": RowCopy(
            source=bench.pool, source_rows=DeviceTensor(rows), target=slab, target_rows=rows
        ),
    }
    good = RowCopy(source=bench.pool, source_rows=rows, target=slab, target_rows=rows)
    for words, copy in wrong.items():
        with pytest.raises(BadInput, match=words):
            bench.lane.submit([good, copy])
    bench.lane.mark().wait(30)
    bench.check()
    bench.lane.close()
    bench.lane.close()
    with pytest.raises(BadState, match="closed"):
        bench.lane.submit([good])
    with pytest.raises(BadInput, match=r"1\.\.132"):
        Bench(1, block_count_max=133)


def memory_is_registered_whole_and_let_go():
    device, heard = Device(), []
    memory = host_memory(1 << 20)
    register(
        device,
        memory,
        row_bytes=ROW_BYTES,
        chunk_bytes=400_000,
        progress=lambda *bytes_of: heard.append(bytes_of),
    )
    assert [done % ROW_BYTES for done, _ in heard[:-1]] == [0] * (len(heard) - 1)
    assert heard[-1] == (1 << 20, 1 << 20)
    assert len(heard) == 4
    with pytest.raises(Unavailable, match="cuMemHostRegister"):
        register(device, memory[: 1 << 12], row_bytes=1)
    part = memory[: 4 << 12]
    del memory
    with pytest.raises(Unavailable, match="cuMemHostRegister"):
        register(device, part, row_bytes=1)
    del part
    again = pinned_memory(device, 1 << 20)
    assert not again.any()
    with pytest.raises(BadInput, match="whole pages"):
        register(device, again[5:], row_bytes=1)


def a_plan_runs_from_the_host_without_the_host():
    random = np.random.default_rng(4)
    for query_max, top_k, alone in [(3, 40, True), (6, 64, False)]:
        arenas = [Arena.alone(row_count=640, slot_count=128) for _ in range(2)]
        shape = ResolveShape.of(query_max=query_max, top_k=top_k, block_max=2)
        if not alone:
            shape = ResolveShape(
                query_max=query_max, top_k=top_k, block_max=2, alone=False, threads=512
            )
        device = Device()
        stream = CudaStream(device)
        residency = Residency(device, shape, arenas[1], lambda n: np.full(n, -7, np.int32))
        splits = [Split.create(query_count=query_max, top_k=top_k) for _ in range(2)]
        for step in range(300, 306):
            rows = random.integers(-1, 300, (query_max, top_k)).astype(np.int32)
            claims = lru.plan(arenas[0], rows, step=step, ticket=step, split=splits[0])
            residency.now[:] = now_of(step=step, ticket=step, query_count=query_max, block_count=2)
            residency.plan(splits[1], rows, stream=stream.handle)
            stream.synchronize()
            assert residency.report()["claimed"] == claims.slots.size
            assert residency.report()["places"] == claims.place_count
            landed = residency.workspace["claimed_slots"]
            residency.land(landed, stream=stream.handle, count=residency.claimed_count)
            lru.land(arenas[0], claims.slots, ticket=step)
            stream.synchronize()
            same_arena(arenas, step)
        located(residency, arenas[0], stream, random)
        gone = np.unique(random.integers(0, 640, 90)).astype(np.int32)
        residency.drop(gone, stream=stream.handle)
        lru.drop(arenas[0], gone)
        stream.synchronize()
        same_arena(arenas, 306)


def located(residency, arena, stream, random):
    resident = arena.row_of[arena.row_of >= 0]
    rows = random.choice(resident, (3, 20)).astype(np.int32)
    rows[:, ::7] = -1
    slots = np.full((3, 24), -5, np.int32)
    residency.now[:] = now_of(step=305, ticket=1, query_count=3, block_count=2, stamps=False)
    residency.locate(slots, rows, stream=stream.handle)
    stream.synchronize()
    np.testing.assert_array_equal(slots[:, :20], np.where(rows < 0, -1, arena.slot_of[rows]))
    assert (slots[:, 20:] == -5).all()
    assert residency.report()["faults"] == 0
    absent = np.flatnonzero(arena.slot_of < 0)[:4].astype(np.int32)[None]
    residency.locate(slots, absent, stream=stream.handle)
    stream.synchronize()
    assert residency.report()["faults"] == 4


def same_arena(arenas, step):
    lru.check(arenas[1], step=step)
    for name in ("slot_of", "row_of", "last_use", "ticket_of", "dirty", "hit_age"):
        np.testing.assert_array_equal(getattr(arenas[1], name), getattr(arenas[0], name), name)


SCENARIOS = (
    jobs_keep_their_order_and_their_rows,
    a_job_follows_the_compute_stream_and_compute_follows_the_job,
    refusals_name_what_is_wrong_and_change_nothing,
    memory_is_registered_whole_and_let_go,
    a_plan_runs_from_the_host_without_the_host,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("driver")
    emulated_driver.build_driver(home)
    return home


@pytest.mark.slow
@pytest.mark.skipif(not native.available(), reason=native.why_missing())
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_scenario(scenario, folder):
    printed = emulated_driver.run_script(__file__, folder, ESS_SCENARIO=scenario.__name__)
    assert printed == f"{scenario.__name__}\n"


def play(name):
    emulated_driver.begin()
    next(one for one in SCENARIOS if one.__name__ == name)()
    print(name)


if __name__ == "__main__":
    import os

    play(os.environ["ESS_SCENARIO"])
    sys.exit(0)
