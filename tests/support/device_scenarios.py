"""What the lane of a device must do, on a real one and on the emulated driver.

Neither torch nor any package but NumPy and cuda-python is needed.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from ess.errors import BadInput, BadState, Unavailable
from ess.flashtrans.mover import RowMover
from ess.flashtrans.stream_lane import StreamLane
from ess.kernels.cuda import driver, pinned
from ess.kernels.cuda.arrays import DeviceArray
from ess.kernels.cuda.driver import Device
from ess.kernels.cuda.graphs import CudaGraph
from ess.kernels.cuda.memory import DeviceMemory, copy_to_device, copy_to_host
from ess.kernels.cuda.numa import prefer_node
from ess.kernels.cuda.pinned import pinned_memory, register
from ess.kernels.cuda.rows import flat_form, move_record, ring_form
from ess.kernels.cuda.streams import CudaEvent, CudaStream
from ess.kernels.memory import host_memory
from ess.kernels.streams import RowCopy

ROW_BYTES = 656


def random_rows(random, count, row_bytes=ROW_BYTES):
    return random.integers(0, 256, (count, row_bytes), dtype=np.uint8)


class Rig:
    """A pool on the host, a slab on the device, and what both should hold by now."""

    def __init__(self, seed=0, **options):
        self.random = np.random.default_rng(seed)
        self.device = Device()
        self.compute = CudaStream(self.device)
        options = {"list_capacity": 256, "place_bytes": 20_480, "block_count_max": 2} | options
        self.lane = StreamLane(self.device, compute_stream=lambda: self.compute.handle, **options)
        self.mover = RowMover(self.device, block_count_max=2)
        pool = pinned_memory(self.device, 500 * ROW_BYTES, row_bytes=ROW_BYTES, touch_threads=1)
        self.pool = pool.reshape(-1, ROW_BYTES)
        self.pool[:] = random_rows(self.random, 500)
        self.expected = {"pool": self.pool.copy(), "slab": random_rows(self.random, 300)}
        self.slab = DeviceArray(self.device, self.expected["slab"])
        self.given = []

    def job(self):
        """A fetch or a store of some rows, with pairs to skip, lists of either width, or none."""
        count = int(self.random.choice([0, 1, 30, 70, 150, 290]))
        lists = {
            "pool": self.random.permutation(500)[:count],
            "slab": self.random.permutation(300)[:count],
        }
        for name, rows in lists.items():
            rows[self.random.random(count) < 0.1] = -1
            lists[name] = rows.astype(self.random.choice([np.int32, np.int64]))
        sides = ("pool", "slab") if self.random.random() < 0.7 else ("slab", "pool")
        self.move(lists, *sides)
        matrix = {"pool": self.pool, "slab": self.slab}
        self.given += lists.values()
        keywords = {}
        for side, name in zip(("source", "target"), sides, strict=True):
            rows = lists[name]
            if name == "slab" and self.random.random() < 0.2:
                rows = DeviceArray(self.device, rows.astype(np.int32))
            keywords |= {side: matrix[name], f"{side}_rows": rows}
        return RowCopy(**keywords)

    def forget_lists(self):
        """The caller uses its lists again as soon as the job is submitted."""
        for rows in self.given:
            rows[:] = -7
        self.given.clear()

    def move(self, lists, source, target):
        kept = (lists[source] >= 0) & (lists[target] >= 0)
        rows = self.expected[source][lists[source][kept]]
        self.expected[target][lists[target][kept]] = rows

    def check(self):
        np.testing.assert_array_equal(self.pool, self.expected["pool"])
        np.testing.assert_array_equal(self.slab.read(), self.expected["slab"])


def jobs_keep_their_order_and_their_rows(job_count=25):
    for seed, way in enumerate(["flat", "ring", "staged"]):
        rig = Rig(seed, way=way)
        for turn in range(job_count):
            event = rig.lane.submit([rig.job() for _ in range(rig.random.integers(1, 4))])
            rig.forget_lists()
            if turn % 3 == 0:
                event.wait(30)
                rig.check()
                assert event.started_ns <= event.finished_ns
        rig.lane.mark().wait(30)
        rig.check()
        rig.lane.close()


def a_job_follows_the_compute_stream_and_compute_follows_the_job(turn_count=15):
    rig = Rig(3)
    dense = DeviceArray(rig.device, np.zeros((40, ROW_BYTES), np.uint8))
    slots = np.arange(40, dtype=np.int32)
    for turn in range(turn_count):
        words = 40 * ROW_BYTES // 4
        driver.call("cuMemsetD32Async", rig.slab.data_ptr(), turn, words, rig.compute.handle)
        store = RowCopy(
            source=rig.slab, source_rows=slots, target=rig.pool, target_rows=slots + 100
        )
        fetch = RowCopy(
            source=rig.pool, source_rows=slots + turn, target=rig.slab, target_rows=slots + 200
        )
        rig.lane.submit([store, fetch]).hold(rig.compute.handle)
        move(rig, flat_form(ROW_BYTES), rig.slab[200:240], dense)
        rig.compute.synchronize()
        assert (rig.pool[100:140].view(np.int32) == turn).all(), turn
        np.testing.assert_array_equal(dense.read(), rig.pool[turn : turn + 40])


def jobs_go_on_while_an_audit_looks_at_them():
    rig, rows = Rig(4), np.arange(3)
    copy = RowCopy(source=rig.pool, source_rows=rows, target=rig.slab, target_rows=rows)
    with mock.patch.object(CudaEvent, "done", return_value=False):
        for _ in range(2):
            rig.lane.submit([copy])
    with mock.patch.object(CudaEvent, "done", side_effect=[False, True]):
        rig.lane.check()
    rig.lane.close()


def move(rig, form, source, target, *, source_rows=None, target_rows=None, count=None, blocks=2):
    """On the compute stream, without the lane."""
    address = lambda one: 0 if one is None else one.data_ptr()  # noqa: E731
    record = move_record(
        source=source.data_ptr(),
        source_rows=address(source_rows),
        source_stride=source.stride()[0],
        target=target.data_ptr(),
        target_rows=address(target_rows),
        target_stride=target.stride()[0],
        count=address(count),
        pair_count=source.shape[0] if source_rows is None else source_rows.shape[0],
    )
    kernel = rig.device.kernel(form.program, form.entry, shared_bytes=form.shared_bytes)
    kernel.launch(
        record,
        blocks=blocks,
        threads=form.threads,
        stream=rig.compute.handle,
        shared_bytes=form.shared_bytes,
    )


def counted_copies_follow_a_graph(replay_count=8):
    """Fetch and store on a stream that joins the capture of another, with lists and counts that
    change between replays; behind the count the lists hold what would stray."""
    rig, copies = Rig(4), CudaStream(Device())
    most, stale = 90, np.iinfo(np.int32).max
    there = {name: DeviceArray(rig.device, np.zeros(most, np.int32)) for name in ("pool", "slab")}
    count = DeviceArray(rig.device, np.zeros(1, np.int32))
    again = DeviceArray(rig.device, np.zeros((500, ROW_BYTES), np.uint8))
    rows = {"source_rows": there["pool"], "target_rows": there["slab"]}
    fetch = RowCopy(source=rig.pool, target=rig.slab, count=count, **rows)
    rows = {"source_rows": there["slab"], "target_rows": there["pool"]}
    store = RowCopy(source=rig.slab, target=again, count=count, **rows)
    rig.mover.queue([fetch, store], rig.compute.handle)  # loads the programs
    graph, begun, landed = CudaGraph(rig.device), CudaEvent(rig.device), CudaEvent(rig.device)
    with graph.capture(rig.compute.handle):
        begun.record(rig.compute.handle)
        rig.mover.queue([fetch], copies.handle, after=begun, then=landed)
        rig.mover.queue([store], rig.compute.handle, after=landed)
    expected_again = np.zeros((500, ROW_BYTES), np.uint8)
    for wanted in [0, 1, most, 3 * most, *rig.random.integers(2, most, replay_count)]:
        taken = min(int(wanted), most)
        lists = {"pool": rig.random.permutation(500), "slab": rig.random.permutation(300)}
        for name, numbers in lists.items():
            kept = numbers[:most].astype(np.int32)
            kept[rig.random.random(most) < 0.1] = -1
            lists[name] = kept[:taken].copy()
            kept[taken:] = stale
            there[name].write(kept)
        count.write([wanted])
        rig.move(lists, "pool", "slab")
        both = (lists["pool"] >= 0) & (lists["slab"] >= 0)
        expected_again[lists["pool"][both]] = rig.expected["slab"][lists["slab"][both]]
        graph.launch(rig.compute.handle)
        rig.compute.synchronize()
        rig.check()
        np.testing.assert_array_equal(again.read(), expected_again)


def a_count_asks_for_lists_on_the_device():
    rig, rows = Rig(1), np.arange(4)
    count = DeviceArray(rig.device, np.array([2], np.int32))
    there = DeviceArray(rig.device, rows.astype(np.int32))
    good = {"source": rig.pool, "target": rig.slab, "source_rows": there, "target_rows": there}
    wrong = {
        "so source_rows must be there": good | {"source_rows": rows, "count": count},
        "must be one int32": good | {"count": DeviceArray(rig.device, np.array([2], np.int64))},
        "count is ndarray": good | {"count": np.array([2], np.int32)},
    }
    for words, keywords in wrong.items():
        with pytest.raises(BadInput, match=words):
            rig.lane.submit([RowCopy(**keywords)])
    with pytest.raises(BadInput, match="submit such copies to a lane"):
        rig.mover.queue([RowCopy(**good | {"target_rows": rows})], rig.compute.handle)
    there.write([3, 2, 500_000, -7])
    event = rig.lane.submit([RowCopy(**good, count=count)])
    rig.move({"pool": np.array([3, 2]), "slab": np.array([3, 2])}, "pool", "slab")
    event.wait(30)
    rig.check()


def copies_of_the_driver_are_cut_where_registrations_meet():
    device = Device()
    memory = host_memory(1 << 20)
    register(device, memory, row_bytes=ROW_BYTES, chunk_bytes=400_000)
    memory[:] = np.random.default_rng(0).integers(0, 256, memory.size)
    there = DeviceMemory(device, memory.size)
    stream = CudaStream(device)
    kept = memory.copy()
    for begin, end in (
        (0, memory.size),
        (300_001, 700_003),
        (5, 6),
        (0, 335_872),
        (671_744, 1 << 20),
    ):
        here = int(memory.__array_interface__["data"][0]) + begin
        to = there.address + begin
        way = {"device": device, "byte_count": end - begin, "stream": stream.handle}
        copy_to_device(target=to, source=here, **way)
        stream.synchronize()
        memory[begin:end] = 0
        copy_to_host(target=here, source=to, **way)
        stream.synchronize()
        np.testing.assert_array_equal(memory, kept)


def pinned_memory_is_near_and_not_for_children():
    device = Device()
    memory = pinned_memory(device, 1 << 20)
    assert "dc" in mapping_of(memory, "smaps", "VmFlags:").split(), "a forked child has it"
    if device.host_node >= 0 and prefer_node(host_memory(1 << 20), device.host_node):
        assert f"prefer:{device.host_node}" in mapping_of(memory, "numa_maps", "")


def mapping_of(memory, file, line):
    """What the system says of the mapping that begins at or before the memory's middle."""
    middle = int(memory.__array_interface__["data"][0]) + memory.nbytes // 2
    begun, said = -1, ""
    for text in Path("/proc/self", file).read_text().splitlines():
        head = re.match(r"([0-9a-f]+)(-[0-9a-f]+)? ", text)
        begun = int(head[1], 16) if head else begun
        if begun <= middle and text.startswith(line):
            said = text
    return said


def chunks_are_queued_by_native_code():
    """Python makes as many calls of the driver for seven chunks as for one."""
    rig, called = Rig(2, way="staged", list_capacity=4096), []
    attempt, made = driver.attempt, []
    driver.attempt = lambda name, *given: called.append(name) or attempt(name, *given)
    for row_count in (3, 3, 31, 140):
        rows = {"pool": rig.random.permutation(500)[:row_count]}
        rows["slab"] = rig.random.permutation(300)[:row_count]
        rig.move(rows, "pool", "slab")
        far, near = rows["pool"], rows["slab"]
        copy = RowCopy(source=rig.pool, source_rows=far, target=rig.slab, target_rows=near)
        called.clear()
        event = rig.lane.submit([copy])
        made.append([name for name in called if name not in ("cuEventQuery", "cuEventElapsedTime")])
        event.wait(30)
        rig.check()
    assert made[1] == made[2] == made[3], made
    assert "cuMemcpyHtoDAsync" in made[1], "the list of targets is sent"
    assert "cuLaunchKernel" not in made[1], made[1]


def a_lane_that_is_dropped_waits_for_its_jobs():
    """Until they are over, what they use stays: the host's function reads its job and a list. Its
    stream may go first, where both are garbage of one cycle."""
    for way, stream_goes in itertools.product(("flat", "staged"), (False, True)):
        rig = Rig(9, way=way)
        rows = {
            "pool": rig.random.permutation(500)[:140],
            "slab": rig.random.permutation(300)[:140],
        }
        rig.move(rows, "pool", "slab")
        far, near = rows["pool"], rows["slab"]
        event = rig.lane.submit(
            [RowCopy(source=rig.pool, source_rows=far, target=rig.slab, target_rows=near)]
        )
        if stream_goes:
            driver.call("cuStreamDestroy", rig.lane._stream.handle)
        del rig.lane
        assert event.done(), way
        rig.check()


def a_fetch_that_fails_midway_keeps_what_is_queued():
    """The first chunk's gathering is queued when its spreading is refused."""
    rig = Rig(10, way="staged")
    describe = rig.lane._staging._describe

    def describe_wrongly(*given):
        describe(*given)
        rig.lane._staging._fetch.block_threads = 4096

    rig.lane._staging._describe = describe_wrongly
    rows = np.arange(140)
    copy = RowCopy(source=rig.pool, source_rows=rows, target=rig.slab, target_rows=rows)
    with pytest.raises(BadState, match="a fetch by the copy engine"):
        rig.lane.submit([copy])
    rig.lane._staging._describe = describe
    kept = rig.lane._pending[-1].kept
    assert any(isinstance(each, ctypes.Array) for each in kept), "the gathering reads its job"
    rig.lane.close()
    rig.check()


def memory_that_is_dropped_waits_for_its_copies():
    device = Device()
    stream, there = CudaStream(device), DeviceMemory(device, 1 << 16)
    memory = pinned_memory(device, 1 << 16, touch_threads=1)
    memory[:] = 7
    way = {"device": device, "byte_count": memory.nbytes, "stream": stream.handle}
    here = int(memory.__array_interface__["data"][0])
    copy_to_device(target=there.address, source=here, **way)
    landed = stream.record()
    del memory
    assert landed.done()
    back = pinned_memory(device, 1 << 16, touch_threads=1)
    here = int(back.__array_interface__["data"][0])
    copy_to_host(target=here, source=there.address, **way)
    stream.synchronize()
    assert (back == 7).all()


def refusals_name_what_is_wrong_and_change_nothing():
    rig = Rig(1)
    slab, rows = rig.slab, np.arange(4)
    stray = np.zeros((10, ROW_BYTES), np.uint8)
    wrong = {
        "cannot reach": RowCopy(source=stray, source_rows=rows, target=slab, target_rows=rows),
        "neither": RowCopy(source=rig.pool, source_rows=rows, target=stray, target_rows=rows),
        r"source_rows\[3\] is 500": RowCopy(
            source=rig.pool, source_rows=rows + 497, target=slab, target_rows=rows
        ),
        r"int64, must be int32 on a device": RowCopy(
            source=rig.pool,
            source_rows=DeviceArray(rig.device, rows),
            target=slab,
            target_rows=rows,
        ),
    }
    good = RowCopy(source=rig.pool, source_rows=rows, target=slab, target_rows=rows)
    for words, copy in wrong.items():
        with pytest.raises(BadInput, match=words):
            rig.lane.submit([good, copy])
    rig.lane.mark().wait(30)
    rig.check()
    rig.lane.close()
    rig.lane.close()
    with pytest.raises(BadState, match="closed"):
        rig.lane.submit([good])
    with pytest.raises(BadInput, match=r"1\.\."):
        Rig(1, block_count_max=1000)


def memory_is_registered_whole_and_let_go():
    device, memory = Device(), host_memory(1 << 20)
    register(device, memory, row_bytes=ROW_BYTES, chunk_bytes=400_000)
    sizes = list(device.pinned._sizes.values())
    assert [size % ROW_BYTES for size in sizes[:-1]] == [0] * 3
    assert sum(sizes) == 1 << 20
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


def a_chunk_that_is_refused_is_registered_in_halves():
    with mock.patch.dict(os.environ, EMULATED_REGISTERED="200000"):
        device, memory = Device(), host_memory(1 << 20)
        with pytest.raises(Unavailable, match=r"1.*MiB of host memory: cuMemHostRegister .*VALUE"):
            register(device, memory, row_bytes=16)
        assert not device.pinned._sizes
        with mock.patch.object(pinned, "HALVED_BYTES_MIN", 4096):
            register(device, memory, row_bytes=16)
    sizes = list(device.pinned._sizes.values())
    assert sizes == [1 << 17] * 8
    del memory
    assert not device.pinned._sizes


def every_form_moves_the_same_bytes(row_sizes=(264,), pair_count=300, ways=("flat", "ring")):
    """Host to device and back, each compiled form."""
    rig = Rig(5)
    for row_bytes in row_sizes:
        for form in (each for each in forms(row_bytes) if each.way in ways):
            source = pinned_rows(rig, row_bytes, 400)
            source[:] = random_rows(rig.random, 400, row_bytes)
            back = pinned_rows(rig, row_bytes, 400)
            middle = DeviceArray(rig.device, np.zeros((400, row_bytes), np.uint8))
            lists = [rig.random.permutation(400)[:pair_count].astype(np.int32) for _ in range(2)]
            lists[0][::11] = -1
            there = [DeviceArray(rig.device, rows) for rows in lists]
            move(rig, form, host(source), middle, source_rows=there[0], target_rows=there[1])
            move(rig, form, middle, host(back), source_rows=there[1], target_rows=there[0])
            rig.compute.synchronize()
            kept = lists[0] >= 0
            expected = np.zeros_like(source)
            expected[lists[0][kept]] = source[lists[0][kept]]
            np.testing.assert_array_equal(back, expected, str(form))


def forms(row_bytes):
    yield flat_form(row_bytes)
    if row_bytes % 16 == 0:
        yield ring_form(row_bytes)


def pinned_rows(rig, row_bytes, count):
    memory = pinned_memory(rig.device, count * row_bytes, touch_threads=1)
    return memory.reshape(count, row_bytes)


def host(rows):
    """Registered memory under the names that a device array has."""
    return SimpleNamespace(
        data_ptr=lambda: int(rows.__array_interface__["data"][0]),
        stride=lambda: rows.strides,
        shape=rows.shape,
    )
