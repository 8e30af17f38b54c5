"""A GPU that is not there: `-p tests.support.pretended`, or `python -m` it with a module to run.

For a module, which is a benchmark, kernels of Triton are not run. New memory is zero then, so that
code that reads results of kernels, as an engine does, sees the same in every run.

Torch's tensors of the device are tensors of the host with a mark, the driver is the emulated one,
Triton's kernels are interpreted, and every line of Python runs as it would beside a device. What a
real one refuses is refused: tensors of two devices in one call, NumPy's hands on a tensor of the
device, a kernel over pageable memory, and while a graph is captured whatever waits or copies from
pageable memory. A replay does again what was captured, on the stream that launches it; other
streams of the capture have stand-ins, which nothing orders but the graph. Torch's work is done at
once, whatever its stream, when what is queued there is done; `RACES` finds what nothing orders.

`without_waits` refuses the same where nothing is captured: what makes the host wait for the device.
Elsewhere `PRETENCE.waited` counts it by name. Who launches counts `PRETENCE.moment`: to wait for an
event of an earlier one is no wait for what runs. A tensor may go when no other stream has queued
what names its memory, or when that stream was recorded for it, as torch's allocator asks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import sys
import tempfile
import weakref
from pathlib import Path
from types import SimpleNamespace

from tests.support import emulated_driver, interpreted  # before triton and torch
from tests.support.pretended_races import caller
from tests.support.pretended_streams import (
    DEVICE,
    REFUSED,
    CUDAGraph,
    Device,
    Event,
    Queues,
    Stream,
)
from tests.support.pretended_touches import UNWRITTEN, is_inplace, leaves, of_torch
from tests.support.pretended_waits import UPLOADS, Numbers, is_there, may_be_number, reads_back

import torch  # isort: skip
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from triton.runtime.interpreter import InterpretedFunction

pytest_configure = interpreted.pytest_configure  # what NumPy warns of, a device does not

IS_MODULE = __name__ == "__main__"
ANYWHERE = {"copy_", "set_", "__get__", "type_as", "view_as", "expand_as", "reshape_as"}
HOST_ONLY = {"numpy", "__array__"}
STREAM_OF = {
    **dict.fromkeys(("cuStreamWaitEvent", "cuLaunchHostFunc"), 0),
    "cuEventRecord": 1,
    **dict.fromkeys(("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync"), -1),
    "cuMemsetD32Async": -1,
}
PICKS = {"__getitem__", "gather", "index_select", "take_along_dim"}
SHAPES = {"dim", "size", "numel", "stride", "is_contiguous", "__len__"}
SHAPES |= {"data_ptr", "untyped_storage", "element_size", "storage_offset"}
SHAPE_FIELDS = {torch.Tensor.shape, torch.Tensor.dtype, torch.Tensor.ndim}
# Without the one for a context, which what is let go asks for wherever its end comes.
BLOCKING = {f"cu{name}Synchronize" for name in ("Event", "Stream")} | {
    f"cuMemcpy{way}" for way in ("", "HtoD", "DtoH", "DtoD")
}


def tensors(*things):
    return leaves(things)


def at_capture(func, args, kwargs):
    """Nothing is computed: what is written to stays as it is, and what is picked by numbers of the
    device, which are not there yet, is so large all the same."""
    name = func.__name__
    if is_inplace(name) or "out" in kwargs:
        return lambda: kwargs.get("out", args[0])
    if name in PICKS:
        return lambda: func(args[0], *tree_map(first_ones, args[1:]), **kwargs)
    return None


def is_shape(name, func):
    """Whether a call asks for what a tensor is and not for what it holds: half of all calls do. It
    is no work of a device, and a replay need not ask again."""
    return name in SHAPES or (name == "__get__" and func.__self__ in SHAPE_FIELDS)


def first_ones(thing):
    is_index = isinstance(thing, torch.Tensor) and not thing.is_floating_point()
    return thing.new_zeros(thing.shape) if is_index else thing


def mm(one, other):
    """Of bfloat16, with sums in float32."""
    return one.float() @ other.float()


def zeroed(func):
    return lambda *args, **kwargs: func(*args, **kwargs).zero_()


def names_device(thing):
    return isinstance(thing, torch.device) or (isinstance(thing, str) and thing[:4] in "cuda cpu")


class Pretence(Queues, TorchFunctionMode):
    pinned = frozenset()

    def __init__(self):
        super().__init__()
        self.streams_of = {}
        self.held_bytes = self.most_bytes = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.__name__, dict(kwargs or {})
        if len(args) == 1 and not kwargs and is_shape(name, func):
            return func(*args)
        if name == "mm" and kwargs.pop("out_dtype", None) is not None:  # the host has none
            func = mm
        if name == "__get__" and func.__self__ == torch.Tensor.device:
            return DEVICE if is_there(args[0]) else func(*args)
        if name == "__get__" and func.__self__ == torch.Tensor.is_cuda:
            return is_there(args[0])
        if name == "__get__" and func.__self__ == torch.Tensor.is_cpu:
            return not is_there(args[0])
        if name == "is_pinned":
            return self.is_pinned(args[0])
        if name in ("cuda", "cpu", "pin_memory", "to"):
            return self.move(name, *args, **kwargs)
        wanted = kwargs.get("device")
        kwargs |= {"device": "cpu"} if wanted is not None else {}
        pins = kwargs.pop("pin_memory", False)
        if pins and self.captured is not None:
            raise RuntimeError(REFUSED.format("pin_memory"))
        if name in UPLOADS and wanted is not None and torch.device(wanted).type == "cuda":
            self.refuse(name)
        all_given = tensors(args, kwargs)
        self.check(name, args, kwargs, all_given)
        given = any(map(is_there, all_given))
        there = given if wanted is None else torch.device(wanted).type == "cuda"
        if name == "copy_":
            there = is_there(args[0])
        own = args, kwargs
        capturing = self.captured is not None and given
        if capturing:  # and lists as they are now
            args, kwargs = self.by_address(own)
        made = zeroed(func) if name in UNWRITTEN and IS_MODULE else func
        numbers = any(is_there(each) and may_be_number(each) for each in all_given)
        if numbers and not reads_back(name, *own):
            everything = tensors(own, args, kwargs)
            made = self.watched(made, name, [each for each in everything if not is_there(each)])
        first = None
        if capturing:
            first = at_capture(func, *own) or functools.partial(made, *own[0], **own[1])
        call, told = lambda: made(*args, **kwargs), lambda made: of_torch(name, args, kwargs, made)
        return self.run(call, there, pins, queues=given, first=first, told=told, name=name)

    def watched(self, func, name, here):
        def call(*args, **kwargs):
            with Numbers(here, lambda: self.refuse(name)):
                return func(*args, **kwargs)

        return call

    def run(self, call, there, pins=False, queues=False, first=None, told=None, name=""):
        """What `queues` is work of the device, wherever its result lies. `first` is called instead
        the first time. `told` says what it reads and writes."""
        result = (first or call)()
        self.call_count += queues
        for each in tensors(result):
            each.is_there = there
            if there:
                self.follow(each.untyped_storage())
            if pins:
                self.pin(each.untyped_storage())
        place = self.races.place_of(name)
        if self.captured is not None and (there or queues):
            held = self.by_address(result)
            self.capture(lambda _: again(call, held, told, place), self.stream)
        elif self.races.is_on and told is not None:
            with torch._C.DisableTorchFunction():
                reads, writes, fresh = told(result)
                self.races.forget(fresh)
                self.tell(reads, writes, place)
        return result

    def follow(self, memory):
        """Memory of the device, to its end."""
        at = memory.data_ptr()
        if at and at not in self.streams_of:
            self.streams_of[at] = set()
            if self.captured is not None:
                self.memories[at] = memory
            self.held_bytes += memory.nbytes()
            self.most_bytes = max(self.most_bytes, self.held_bytes)
            weakref.finalize(memory, self.let_go, at, memory.nbytes()).atexit = False

    def record_stream(self, tensor, stream):
        if tensor.numel():
            self.streams_of[tensor.untyped_storage().data_ptr()].add(stream.cuda_stream)

    def let_go(self, at, byte_count):
        for stream in self.streams_of.pop(at):
            self.races.finish(stream)
        self.lose(at)
        self.held_bytes -= byte_count
        self.races.driver.driver_let_go(at, byte_count)

    def pin(self, memory):
        at = memory.data_ptr()
        self.pinned |= {at}
        weakref.finalize(memory, self.unpin, at, memory.nbytes()).atexit = False

    def unpin(self, at, byte_count):
        """Torch waits for its own copies before it lends this again, and for no other's work."""
        self.pinned -= {at}
        self.lose(at)
        self.races.driver.driver_let_go(at, byte_count)

    def tell(self, reads, writes, place):
        """Of the host's memory only what the device reaches is told."""
        every = [
            [touch for touch in touches if self.is_shared(touch)] for touches in (reads, writes)
        ]
        if any(every):
            queues = any(is_there(each) for each in tensors(reads, writes))
            self.races.touched(self.stream if queues else None, place, *every)

    def is_shared(self, touch):
        tensor = touch[0] if isinstance(touch, tuple) else touch
        return is_there(tensor) or self.is_pinned(tensor)

    def is_pinned(self, tensor):
        if registered(tensor):
            return True
        return tensor.untyped_storage().data_ptr() in self.pinned

    def check(self, name, args, kwargs, given):
        there, here = [t for t in given if is_there(t)], [t for t in given if not is_there(t)]
        if there and name in HOST_ONLY:
            raise TypeError(f"can't convert cuda:0 device type tensor to numpy: {name}")
        indexes = name in ("__getitem__", "__setitem__")
        free = name in ANYWHERE or (indexes and is_there(args[0]))
        if there and not free and any(each.dim() for each in here):
            raise RuntimeError(f"expected all tensors to be on the same device, in {name}")
        if not there:
            return
        pageable = name == "copy_" and not all(map(self.is_pinned, here))
        if pageable or reads_back(name, args, kwargs) or (indexes and here):
            self.refuse(name)

    def move(self, name, tensor, *args, **kwargs):
        """`cuda`, `cpu`, `pin_memory` and `to`, which copy where the place changes."""
        given = (*args, *kwargs.values())
        named = [each for each in given if names_device(each)]
        named += ["cuda" if is_there(each) else "cpu" for each in tensors(given)]
        wanted = torch.device(named[0]).type if named else name
        there = wanted == "cuda" if wanted in ("cuda", "cpu") else is_there(tensor)
        crosses = there != is_there(tensor) or name == "pin_memory"
        queued = kwargs.get("non_blocking") and there and self.is_pinned(tensor)
        if crosses and (self.captured is not None or not (queued or name == "pin_memory")):
            self.refuse(name)
        args = [each for each in args if name == "to" and not names_device(each)]
        kwargs = {key: each for key, each in kwargs.items() if key in ("dtype", "copy")}
        convert = (lambda one: one.to(*args, **kwargs)) if args or kwargs else (lambda one: one)
        if not crosses and convert(tensor) is tensor:
            return tensor
        given = self.by_address(tensor)
        first = None if crosses else functools.partial(convert, tensor)
        call = (lambda: convert(tensor).clone()) if crosses else (lambda: convert(given))
        told = lambda made: of_torch(name, (given,), {}, made)  # noqa: E731
        queues = is_there(tensor)
        pins = name == "pin_memory"
        made = self.run(call, there, pins, queues, first=first, told=told, name=name)
        if queues and not queued:
            self.races.waited(self.stream)
        return made

    def require_reach(self, given):
        for each in tensors(given):
            if not is_there(each) and not self.is_pinned(each):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")

    def launch(self, call, *given):
        """A kernel: at once, or whenever the graph is replayed; a capture does not run it."""
        self.require_reach(given)
        call() if self.captured is None else self.capture(lambda _: call(), self.stream)


PRETENCE = Pretence()
RACES, Device.queues = PRETENCE.races, PRETENCE


def again(call, held, told, place):
    """What a replay does with a call of torch."""
    with torch._C.DisableTorchFunction():
        for old, new in zip(tensors(held), tensors(call()), strict=False):
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)
        if RACES.is_on and told is not None:
            PRETENCE.tell(*told(held)[:2], place)


def registered(tensor):
    """Page-locked by the driver itself."""
    from ess.kernels.cuda.driver import attempt

    if not tensor.numel() or is_there(tensor):
        return False
    with torch._C.DisableTorchFunction():
        ends = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size() - 1
    return all(attempt("cuMemHostGetDevicePointer", end, 0)[0] == 0 for end in ends)


def synchronize(device=None):
    PRETENCE.refuse("synchronize")
    RACES.driver.driver_drain()


@contextlib.contextmanager
def without_waits():
    before, PRETENCE.may_wait = PRETENCE.may_wait, False
    try:
        yield
    finally:
        PRETENCE.may_wait = before


@contextlib.contextmanager
def graph(made, stream=None, **options):
    """On a stream of its own, as torch's."""
    with PRETENCE.on_stream(stream or capture_stream()):
        made.capture_begin(**options)
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):
                made.capture_end()
            raise
        made.capture_end()


@functools.cache
def capture_stream():
    return Stream()


def interpret(function, *args, grid, warmup, **kwargs):
    """As on a device, but that the interpreter has its own reading of e4m3 and no bfloat16."""
    instead = {"INTERPRETED": True, "IN_BF16": False}
    given = kwargs | {name: instead[name] for name in instead if name in kwargs}
    args, given = PRETENCE.by_address((args, given))

    def call():
        with torch._C.DisableTorchFunction():
            IS_MODULE or RUN(function, *args, grid=grid, warmup=warmup, **given)

    PRETENCE.launch(call, args)


def begin():
    """From here on there is a device, for this process."""
    home = Path(os.environ.setdefault("ESS_EMULATED", tempfile.mkdtemp()))
    emulated_driver.build_driver(home)
    RACES.load(emulated_driver.begin(alone=False))
    import triton.experimental.gluon  # cannot be imported after the next line but one

    from ess.kernels.cuda.triton import ops  # noqa: F401  its kernels are interpreted
    from ess.pool.lru import cuda_shape

    # All that crosses warps and tiles happens in two warps; a thread of a block costs a fiber.
    cuda_shape.PHASE_THREADS = 64

    triton.knobs.runtime.interpret = False
    InterpretedFunction.run = interpret
    queue_at_once()
    properties = SimpleNamespace(
        multi_processor_count=132, name="pretended", shared_memory_per_block_optin=227 << 10
    )
    count = int(os.environ.get("EMULATED_DEVICES", "1"))
    for name, thing in {
        "Stream": Stream, "Event": Event, "CUDAGraph": CUDAGraph, "graph": graph,
        "stream": PRETENCE.on_stream, "device": lambda _: contextlib.nullcontext(),
        "current_stream": lambda _=None: Stream(handle=PRETENCE.stream), "synchronize": synchronize,
        "is_available": lambda: True, "is_current_stream_capturing": capturing,
        "get_device_capability": lambda _=None: (9, 0),
        "get_device_name": lambda _=None: "pretended",
        "get_device_properties": lambda _=None: properties, "device_count": lambda: count,
        "current_device": lambda: 0, "empty_cache": lambda: None, "set_device": lambda _: None,
        "graph_pool_handle": lambda: (0, 1), "memory_reserved": lambda _=None: 0,
        "mem_get_info": lambda _=None: (1 << 40, 1 << 40),
        "memory_allocated": lambda _=None: PRETENCE.held_bytes,
        "max_memory_allocated": lambda _=None: PRETENCE.most_bytes,
        "reset_peak_memory_stats": forget_peak,
    }.items():  # fmt: skip
        setattr(torch.cuda, name, thing)
    torch.Tensor.record_stream = lambda tensor, stream: PRETENCE.record_stream(tensor, stream)
    PRETENCE.__enter__()


def forget_peak(_=None):
    PRETENCE.most_bytes = PRETENCE.held_bytes


def capturing():
    return PRETENCE.captured is not None


def queue_at_once():
    """What is queued on the current stream, that is."""
    from ess.kernels.cuda import driver, streams

    launch, attempt = driver.Kernel.launch, driver.attempt

    def launch_and_wait(kernel, record, *, stream, **shape):
        copied = type(record).from_buffer_copy(record)
        PRETENCE.queue(lambda stream: launch(kernel, copied, stream=stream, **shape), stream)

    def attempt_and_wait(name, *given):
        if name in BLOCKING:
            PRETENCE.refuse(name)
        orders = name in ("cuEventRecord", "cuStreamWaitEvent")
        if name == "cuEventRecordWithFlags":  # external: work of a graph, which records it again
            assert PRETENCE.captured is not None, "an external event, and nothing is captured"
            name, given = "cuEventRecord", given[:2]
        if name == "cuStreamCreateWithPriority":
            return named(attempt(name, *given))
        if name not in STREAM_OF:
            return attempt(name, *given)
        at = range(len(given))[STREAM_OF[name]]
        return PRETENCE.queue(
            lambda stream: attempt(name, *given[:at], stream, *given[at + 1 :]),
            given[at],
            orders=orders,
        )

    def named(answer):
        RACES.name(int(answer[1]), caller())
        return answer

    def wait_and_count(event, timeout_s=None):
        PRETENCE.refuse("CudaEvent.wait")
        wait(event, timeout_s)

    wait, streams.CudaEvent.wait = streams.CudaEvent.wait, wait_and_count
    driver.attempt_now = attempt
    driver.Kernel.launch = launch_and_wait
    driver.attempt = attempt_and_wait


def pytest_collection_modifyitems(items):
    """An interpreter is slow; a few replays show what a thousand do but for races."""
    for item in items:
        if hasattr(item.module, "REPLAYS"):
            item.module.REPLAYS = 2


RUN = InterpretedFunction.run
begin()

if IS_MODULE:
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
