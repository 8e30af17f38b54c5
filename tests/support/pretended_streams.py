"""Streams, events and graphs of the pretended device, over those of the emulated driver.

Torch's work is done at once, when all is done that is queued on the current stream; work of the
driver is done at once on the current stream, and on any other one some time. What is captured is
kept as calls that take a stream: a replay gives the launching stream for the one that began the
capture, and stand-ins for the others, which nothing but the graph orders. The emulated driver is
told of each piece of work, so that a capture is refused where a real device would refuse it: work
on a stream that has not joined, a wait for what was queued before, an end with a stream that has
not been waited for.

Graphs share their memory: what one has made is 0xFF, which is NaN in every float, as soon as
another is captured or launched. Of all other memory a graph knows the address and keeps nothing: a
replay is refused when some of it is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
import weakref
from collections import Counter

import torch
from torch.utils._pytree import tree_map

from ess.kernels.cuda.graphs import RELAXED
from tests.support.pretended_races import Races
from tests.support.pretended_waits import is_there

LOCAL = threading.local()
DEVICE = torch.device("cuda", 0)
REFUSED = "operation not permitted when stream is capturing: {}"
WAITED = "the host waits for the device: {}"
STRAY = "work is queued on stream {} while others are captured, which it has not joined"
UNRELATED = "the driver refuses a wait with status {}: only one of both sides is captured"
REPLAYED = "the driver refuses with status {} what a graph holds: an event that is destroyed?"
UNTIMED = "the driver has no time yet, with status {}: was it recorded, and is it over?"
GONE = "the graph names memory of {} bytes that is gone"
ENDED = "the driver ends the capture with status {}: a stream that has joined was not waited for"


class Queues:
    """`captured` holds pairs of a stream and a call while a graph is captured; `stream` is the
    current one."""

    captured, may_wait = None, True
    moment, waited, call_count = 0, Counter(), 0
    stream = 0

    def __init__(self):
        super().__init__()
        self.races = Races()
        self.memories, self.launched = {}, None
        self.named, self.graphs = {}, weakref.WeakSet()
        self._stand_ins = {}

    def take_over(self, graph):
        """What the graph before has made is this one's memory from here on."""
        before, self.launched = self.launched and self.launched(), weakref.ref(graph)
        if before is None or before is graph:
            return
        self.races.finish(self.stream)
        with torch._C.DisableTorchFunction():
            for memory in before.memories.values():
                torch.empty(0, dtype=torch.uint8).set_(memory).fill_(0xFF)

    def refuse(self, name):
        if self.captured is not None:
            raise RuntimeError(REFUSED.format(name))
        if not self.may_wait:
            raise RuntimeError(WAITED.format(name))
        self.waited[name] += 1
        self.races.waited(self.stream)

    def queue(self, call, stream, *, orders=False):
        """Work of the driver: part of the graph that is captured. What `orders` streams is done at
        a capture too: the driver then learns which streams belong to it."""
        place = self.races.place_of("")

        def now(stream):
            self.races.place(place)
            result = call(stream)
            if stream == self.stream:
                self.races.finish(stream)
            return result

        if self.captured is None:
            return now(stream)
        answer = call(stream) if orders else (0,)
        self.capture(now, stream, is_work=not orders)
        return answer

    def capture(self, call, stream, *, is_work=True):
        """Adds a call to the graph, behind what its stream has there."""
        if not self.races.driver.driver_captures(stream, is_work):
            raise RuntimeError(STRAY.format(self.races.names.get(stream, stream)))
        self.captured.append((stream, call))

    def by_address(self, things):
        """The same as a graph knows it: memory that it has not made is not kept alive by it."""
        return tree_map(self._by_address, things) if self.captured is not None else things

    def _by_address(self, thing):
        if not isinstance(thing, torch.Tensor) or not (is_there(thing) or self.is_pinned(thing)):
            return thing
        with torch._C.DisableTorchFunction():
            memory = thing.untyped_storage()
            if not thing.numel() or memory.data_ptr() in self.memories:
                return thing
            self.named[memory.data_ptr()] = memory.nbytes()
            same = alias(thing, memory)
        same.is_there = is_there(thing)
        return same

    def lose(self, at):
        """Memory that began there is gone."""
        for graph in self.graphs:
            graph.gone = graph.gone or graph.named.get(at, 0)

    @contextlib.contextmanager
    def on_stream(self, stream):
        """It is the current one."""
        before, self.stream = self.stream, getattr(stream, "cuda_stream", stream)
        if self.captured is None:
            self.races.finish(self.stream)
        try:
            yield
        finally:
            self.stream = before

    def stand_in(self, stream):
        """One for all graphs: their replays are in turn."""
        if stream not in self._stand_ins:
            name = self.races.names.get(stream, stream)
            self._stand_ins[stream] = self.new_stream(f"in a graph for {name}")
        return self._stand_ins[stream]

    def new_stream(self, name):
        handle = int(driver().attempt_now("cuStreamCreateWithPriority", 1, 0)[1])
        self.races.name(handle, name)
        return handle


def alias(tensor, memory):
    """A tensor over the same memory that does not keep it."""
    whole = memory.nbytes() // tensor.itemsize * tensor.itemsize
    borrowed = (ctypes.c_ubyte * whole).from_address(memory.data_ptr())
    flat = torch.frombuffer(borrowed, dtype=torch.uint8).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class Device:
    queues: Queues


class Stream(Device):
    """One that is made here ends with this object: the watch for races tells 63 streams apart."""

    def __init__(self, device=None, *, handle=None):
        self.device, self.cuda_stream = DEVICE, handle
        if handle is None:
            self.cuda_stream = self.queues.new_stream("of torch")
            end = driver().attempt_now, "cuStreamDestroy", self.cuda_stream
            weakref.finalize(self, *end).atexit = False

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def record_event(self):
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event):
        status, *_ = self.queues.queue(event.hold, self.cuda_stream, orders=True)
        if status:
            raise RuntimeError(UNRELATED.format(status))

    def synchronize(self):
        self.record_event().synchronize()


class Event(Device):
    def __init__(self, enable_timing=False):
        self.timed, self.call_count = enable_timing, 0
        self._handle = driver().attempt_now("cuEventCreate", 0)[1]

    def hold(self, stream):
        return driver().attempt_now("cuStreamWaitEvent", stream, self._handle, 0)

    def record(self, stream=None):
        queues = self.queues
        self.moment, self.call_count = queues.moment, queues.call_count
        queues.queue(
            lambda stream: driver().attempt_now("cuEventRecord", self._handle, stream),
            queues.stream if stream is None else stream.cuda_stream,
            orders=True,
        )

    def query(self):
        return driver().attempt_now("cuEventQuery", self._handle)[0] != driver().NOT_READY

    def elapsed_time(self, end):
        assert self.timed, "both events must be created with argument 'enable_timing=True'"
        assert end.timed
        status, *_ = driver().attempt_now("cuEventElapsedTime", self._handle, end._handle)
        if status:
            raise RuntimeError(UNTIMED.format(status))
        return 0.25 + 1e-3 * (end.call_count - self.call_count)

    def synchronize(self):
        if self.moment == self.queues.moment:
            self.queues.refuse("synchronize")
        else:
            self.queues.waited["an earlier moment"] += 1
        while driver().attempt_now("cuEventQuery", self._handle)[0] == driver().NOT_READY:
            pass


class CUDAGraph(Device):
    gone = 0

    def capture_begin(self, pool=None, capture_error_mode="global"):
        assert self.queues.captured is None, "one capture at a time"
        self.queues.take_over(self)
        self.queues.captured = self.calls = []
        self.queues.memories = self.memories = {}
        self.queues.named = self.named = {}
        self.queues.graphs.add(self)
        self._root = self.queues.stream
        mode = driver().enumerated(*RELAXED)
        assert driver().attempt_now("cuStreamBeginCapture", self._root, mode) == (0,)

    def capture_end(self):
        """After an error, which may have spoilt the capture, as if it had."""
        self.queues.captured = None
        status, *_ = driver().attempt_now("cuStreamEndCapture", self._root)
        if sys.exception() is not None:
            raise RuntimeError("operation failed due to a previous error during capture")
        if status:
            raise RuntimeError(ENDED.format(status))

    def replay(self):
        """Behind what the current stream has queued, which waits for all of it."""
        if self.gone:
            raise RuntimeError(GONE.format(self.gone))
        queues, home = self.queues, Stream(handle=self.queues.stream)
        queues.take_over(self)
        others = {stream for stream, _ in self.calls} - {self._root}
        streams = {stream: Stream(handle=queues.stand_in(stream)) for stream in others}
        for other in streams.values():
            other.wait_stream(home)
        for stream, call in self.calls:
            given = streams.get(stream, home)
            with queues.on_stream(given):
                answer = call(given.cuda_stream)
            if isinstance(answer, tuple) and answer[0]:
                raise RuntimeError(REPLAYED.format(answer[0]))
        for other in streams.values():
            home.wait_stream(other)


@functools.cache
def context():
    from ess.kernels.cuda import driver

    driver.attempt_now("cuInit", 0)
    return driver.attempt_now("cuDevicePrimaryCtxRetain", 0)[1]


def driver():
    """The driver, with a context in this thread."""
    from ess.kernels.cuda import driver

    if not hasattr(LOCAL, "has_context"):
        driver.attempt_now("cuCtxSetCurrent", context())
        LOCAL.has_context = True
    return driver
