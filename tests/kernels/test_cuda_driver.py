"""The emulated driver refuses what a real one refuses, and ends where a real one would crash.

Run as a script, in a process of its own, this file plays its trials; those that end a process are
played in children of it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from ess.errors import BadState
from ess.kernels.cuda import driver, pinned
from ess.kernels.cuda.driver import Device
from ess.kernels.cuda.graphs import CudaGraph
from ess.kernels.cuda.memory import DeviceMemory, copy_to_device
from ess.kernels.cuda.rows import flat_form, move_record, ring_form
from ess.kernels.cuda.streams import CudaEvent, CudaStream
from ess.pool.lru.cuda_records import ResolveRecord
from ess.pool.lru.cuda_shape import CLUSTER_BLOCKS, resolve_program
from tests.support import emulated_driver
from tests.support.emulate import needs_compiler

pytestmark = [
    pytest.mark.slow,
    needs_compiler,
    pytest.mark.skipif(
        importlib.util.find_spec("cuda") is None, reason="cuda-bindings is not installed"
    ),
]

BYTES = 1 << 16
VALUE, HANDLE, NOT_READY = r"INVALID_VALUE \(1\)", r"INVALID_HANDLE \(400\)", r"NOT_READY \(600\)"
NOT_FOUND = r"NOT_FOUND \(500\)"


class Trials:
    """Every public function but those of DEATHS is refused with what REFUSALS says."""

    def __init__(self):
        self.device = Device()
        self.stream, self.form = CudaStream(self.device), flat_form(656)
        self.there = DeviceMemory(self.device, BYTES)
        self.here = pinned.pinned_memory(self.device, BYTES, touch_threads=1)
        self.address = int(self.here.__array_interface__["data"][0])

    def move(self, form=None, record=None, **shape):
        form = form or self.form
        ends = {"source": self.address, "target": self.there.address}
        strides = {"source_stride": 656, "target_stride": 656}
        kernel = self.device.kernel(form.program, form.entry)
        record = record or move_record(**ends, **strides, pair_count=3)
        given = {"blocks": 2, "threads": form.threads, "stream": self.stream.handle}
        kernel.launch(record, **given | shape)

    def copy(self):
        way = {"device": self.device, "byte_count": BYTES, "stream": self.stream.handle}
        copy_to_device(target=self.there.address, source=self.address, **way)

    def destroyed(self, made):
        name = {CudaStream: "cuStreamDestroy", CudaEvent: "cuEventDestroy"}[type(made)]
        driver.call(name, made.handle)
        return made

    # ---- refused

    def a_block_of_many_threads(self):
        self.move(threads=2048)

    def no_block(self):
        self.move(blocks=0)

    def shared_memory_that_was_not_asked_for(self):
        form = ring_form(656)
        self.move(form, shared_bytes=form.shared_bytes)

    def shared_memory_that_no_block_has(self):
        form = ring_form(656)
        self.device._load(form.program, form.entry, 300 << 10)

    def half_a_cluster(self):
        program = resolve_program("together.cu", threads=64, is_scored=False)
        kernel = self.device.kernel(program, "ess_resolve_together")
        shape = {"blocks": CLUSTER_BLOCKS - 1, "threads": 64, "stream": self.stream.handle}
        kernel.launch(ResolveRecord(), **shape)

    def a_stream_that_is_destroyed(self):
        self.move(stream=self.destroyed(CudaStream(self.device)).handle)

    def an_event_that_is_destroyed(self):
        self.destroyed(CudaEvent(self.device)).record(self.stream.handle)

    def a_wait_for_an_event_that_is_destroyed(self):
        self.destroyed(CudaEvent(self.device)).hold(self.stream.handle)

    def a_graph_that_is_destroyed(self):
        graph = CudaGraph(self.device)
        with graph.capture(self.stream.handle):
            self.copy()
        driver.call("cuGraphExecDestroy", graph._executable)
        graph.launch(self.stream.handle)

    def the_time_of_what_was_not_recorded(self):
        self.stream.record().ns_since(CudaEvent(self.device))

    def the_time_of_what_has_not_passed(self):
        begun = self.stream.record()
        self.copy()
        self.stream.record().ns_since(begun)

    def a_form_of_a_call_that_came_later(self):
        assert driver.entry("cuMemcpyBatchAsync", edition=13000)
        driver.entry("cuMemcpyBatchAsync", edition=12090)

    def a_form_of_a_call_by_its_number(self):
        driver.entry("cuMemcpyBatchAsync_v2", edition=13000)

    def a_capture_of_the_legacy_stream(self):
        with CudaGraph(self.device).capture(0):
            pass

    def a_thread_that_has_no_context(self):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(driver.call, "cuEventCreate", 0).result()

    # ---- deaths

    def a_record_that_is_too_small(self):
        self.move(record=(ctypes.c_int64 * 3)())

    def memory_is_freed_that_a_copy_writes(self):
        self.copy()
        driver.call("cuMemFree", self.there.address)

    def memory_is_unregistered_that_a_copy_reads(self):
        self.copy()
        driver.call("cuMemHostUnregister", self.address)

    def memory_is_freed_that_a_kernel_writes(self):
        self.move()
        driver.call("cuMemFree", self.there.address)

    def a_graph_is_launched_whose_memory_was_freed(self):
        graph = CudaGraph(self.device)
        self.move()
        self.stream.synchronize()
        with graph.capture(self.stream.handle):
            self.move()
        driver.call("cuMemFree", self.there.address)
        graph.launch(self.stream.handle)

    def memory_is_written_that_was_let_go(self):
        self.here = None
        ctypes.memset(self.address, 0, 1)

    def a_kernel_reads_memory_that_was_let_go(self):
        self.here = None
        self.move()
        self.stream.synchronize()

    def a_newer_form_of_a_call(self):
        library = ctypes.CDLL("libcuda.so.1")
        library.cuLaunchHostFunc_v2(None, None, None, 0)


REFUSALS = {
    "a_block_of_many_threads": VALUE,
    "no_block": VALUE,
    "shared_memory_that_was_not_asked_for": VALUE,
    "shared_memory_that_no_block_has": VALUE,
    "half_a_cluster": VALUE,
    "a_stream_that_is_destroyed": HANDLE,
    "an_event_that_is_destroyed": HANDLE,
    "a_wait_for_an_event_that_is_destroyed": HANDLE,
    "a_graph_that_is_destroyed": HANDLE,
    "the_time_of_what_was_not_recorded": HANDLE,
    "the_time_of_what_has_not_passed": NOT_READY,
    "a_form_of_a_call_that_came_later": NOT_FOUND,
    "a_form_of_a_call_by_its_number": NOT_FOUND,
    "a_capture_of_the_legacy_stream": r"STREAM_CAPTURE_UNSUPPORTED \(900\)",
    "a_thread_that_has_no_context": r"INVALID_CONTEXT \(201\)",
}
DEATHS = {
    "a_record_that_is_too_small": (signal.SIGABRT, r"ess_move_rows takes 72 bytes, not 24"),
    "memory_is_freed_that_a_copy_writes": (signal.SIGABRT, "queued work names: copy"),
    "memory_is_unregistered_that_a_copy_reads": (signal.SIGABRT, "queued work names: copy"),
    "memory_is_freed_that_a_kernel_writes": (signal.SIGABRT, "work names: ess_move_rows"),
    "a_graph_is_launched_whose_memory_was_freed": (signal.SIGABRT, "is gone: ess_move_rows"),
    "memory_is_written_that_was_let_go": (signal.SIGSEGV, ""),
    "a_kernel_reads_memory_that_was_let_go": (signal.SIGABRT, "outside of every array"),
    "a_newer_form_of_a_call": (signal.SIGABRT, "a form of the call that is newer"),
}


def test_what_a_driver_refuses_and_what_it_does_not_survive(folder):
    emulated_driver.build_driver(folder)
    printed = emulated_driver.run_script(__file__, folder)
    assert printed.splitlines() == [*DEATHS, *REFUSALS]


def ending(name):
    """How a child ended that plays the trial, and what it said. Registered memory is not for
    children, so this process has none yet."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writes, 2)
        getattr(Trials(), name)()
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as said:
        text = said.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


if __name__ == "__main__":
    emulated_driver.begin()
    for name, (number, sentence) in DEATHS.items():
        status, text = ending(name)
        assert status == -number, f"{name}: {status}, {text}"
        assert re.search(sentence, text), f"{name}: {text}"
        print(name, flush=True)
    played = []
    for name, answer in REFUSALS.items():
        played.append(Trials())
        with pytest.raises(BadState, match=answer):
            getattr(played[-1], name)()
        print(name, flush=True)
    os._exit(0)
