"""A GPU that is not there: `-p tests.support.pretended`, or `python -m` it with a module to run.

For a module, which is a benchmark, kernels of Triton are not run: nobody looks at what they write.

Torch's tensors of the device are tensors of the host with a mark, the driver is the emulated one,
Triton's kernels are interpreted, and every line of Python runs as it would beside a device. What a
real one refuses is refused: tensors of two devices in one call, NumPy's hands on a tensor of the
device, a kernel over pageable memory, and while a graph is captured whatever waits or copies from
pageable memory. A replay does again what was captured. Streams keep no time and run at once.

`without_waits` refuses the same where nothing is captured: what makes the host wait for the device.
Elsewhere `PRETENCE.waited` counts it by name. Who launches counts `PRETENCE.moment`: to wait for an
event of an earlier one is no wait for what runs.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

from tests.support import emulated_driver, interpreted  # before triton and torch

import torch  # isort: skip
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from triton.runtime.interpreter import InterpretedFunction

pytest_configure = interpreted.pytest_configure  # what NumPy warns of, a device does not

DEVICE = torch.device("cuda", 0)
ANYWHERE = {"copy_", "set_", "__get__", "type_as", "view_as", "expand_as", "reshape_as"}
WAITS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique"}
HOST_ONLY = {"numpy", "__array__"}
UPLOADS = {"tensor", "as_tensor", "asarray"}
STREAM_OF = {
    **dict.fromkeys(("cuStreamWaitEvent", "cuLaunchHostFunc"), 0),
    "cuEventRecord": 1,
    **dict.fromkeys(("cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync"), -1),
    "cuMemsetD32Async": -1,
}
PICKS = {"__getitem__", "gather", "index_select", "take_along_dim"}
AUGMENTED = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "and", "or")}
BLOCKING = {f"cu{name}Synchronize" for name in ("Ctx", "Event", "Stream")} | {
    f"cuMemcpy{way}" for way in ("", "HtoD", "DtoH", "DtoD")
}
REFUSED = "operation not permitted when stream is capturing: {}"
WAITED = "the host waits for the device: {}"


def is_there(thing):
    return getattr(thing, "is_there", False)


def tensors(*things):
    return list(leaves(things))


def leaves(thing):
    """Torch's own walk over trees takes longer than most calls whose arguments it looks at."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, tuple | list):
        for each in thing:
            yield from leaves(each)
    elif isinstance(thing, dict):
        yield from leaves(list(thing.values()))


def at_capture(func, args, kwargs):
    """Nothing is computed: what is written to stays as it is, and what is picked by numbers of the
    device, which are not there yet, is so large all the same."""
    name = func.__name__
    is_inplace = name in ("__setitem__", *AUGMENTED) or (name[-1] == "_" and name[-2:] != "__")
    if is_inplace or "out" in kwargs:
        return lambda: kwargs.get("out", args[0])
    if name in PICKS:
        return lambda: func(args[0], *tree_map(first_ones, args[1:]), **kwargs)
    return None


def first_ones(thing):
    is_index = isinstance(thing, torch.Tensor) and not thing.is_floating_point()
    return thing.new_zeros(thing.shape) if is_index else thing


def tree_top(index):
    return index if isinstance(index, tuple) else ()


def names_device(thing):
    return isinstance(thing, torch.device) or (isinstance(thing, str) and thing[:4] in "cuda cpu")


class Pretence(TorchFunctionMode):
    """`captured` holds what a replay does: (call, the tensors that its result goes to)."""

    pinned, captured, may_wait = frozenset(), None, True
    moment, waited, call_count = 0, Counter(), 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.__name__, dict(kwargs or {})
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
        if name in UPLOADS and wanted is not None and torch.device(wanted).type == "cuda":
            self.refuse(name)
        self.check(name, args, kwargs)
        given = any(map(is_there, tensors(args, kwargs)))
        there = given if wanted is None else torch.device(wanted).type == "cuda"
        if name == "copy_":
            there = is_there(args[0])
        capturing = self.captured is not None and given
        if capturing:  # lists as they are now
            args, kwargs = tree_map(lambda thing: thing, (args, kwargs))
        first = at_capture(func, args, kwargs) if capturing else None
        return self.run(lambda: func(*args, **kwargs), there, pins, queues=given, first=first)

    def run(self, call, there, pins=False, queues=False, first=None):
        """What `queues` is work of the device, wherever its result lies. `first` is called instead
        the first time."""
        result = (first or call)()
        self.call_count += queues
        for one in tensors(result):
            one.is_there = there
            self.pinned |= {one.untyped_storage().data_ptr()} if pins else set()
        if self.captured is not None and (there or queues):
            self.captured.append((call, result))
        return result

    def is_pinned(self, tensor):
        if registered(tensor):
            return True
        return tensor.untyped_storage().data_ptr() in self.pinned

    def check(self, name, args, kwargs):
        given = tensors(args, kwargs)
        there, here = [t for t in given if is_there(t)], [t for t in given if not is_there(t)]
        if there and name in HOST_ONLY:
            raise TypeError(f"can't convert cuda:0 device type tensor to numpy: {name}")
        indexes = name in ("__getitem__", "__setitem__")
        free = name in ANYWHERE or (indexes and is_there(args[0]))
        if there and not free and any(one.dim() for one in here):
            raise RuntimeError(f"expected all tensors to be on the same device, in {name}")
        if not there:
            return
        pageable = name == "copy_" and not all(map(self.is_pinned, here))
        masked = indexes and any(one.dtype == torch.bool for one in tensors(args[1]))
        listed = indexes and any(isinstance(one, list) for one in (args[1], *tree_top(args[1])))
        if name in WAITS or pageable or masked or listed or (indexes and here):
            self.refuse(name)

    def refuse(self, name):
        if self.captured is not None:
            raise RuntimeError(REFUSED.format(name))
        if not self.may_wait:
            raise RuntimeError(WAITED.format(name))
        self.waited[name] += 1

    def move(self, name, tensor, *args, **kwargs):
        """`cuda`, `cpu`, `pin_memory` and `to`, which copy where the place changes."""
        named = [one for one in (*args, *kwargs.values()) if names_device(one)]
        wanted = torch.device(named[0]).type if named else name
        there = wanted == "cuda" if wanted in ("cuda", "cpu") else is_there(tensor)
        crosses = there != is_there(tensor) or name == "pin_memory"
        queued = kwargs.get("non_blocking") and there and self.is_pinned(tensor)
        if crosses and (self.captured is not None or not (queued or name == "pin_memory")):
            self.refuse(name)
        args = [one for one in args if name == "to" and not names_device(one)]
        kwargs = {key: one for key, one in kwargs.items() if key in ("dtype", "copy")}
        convert = (lambda: tensor.to(*args, **kwargs)) if args or kwargs else (lambda: tensor)
        same = not crosses and convert() is tensor
        call = (lambda: convert().clone()) if crosses else convert
        return tensor if same else self.run(call, there, name == "pin_memory")

    def require_reach(self, given):
        for one in tensors(given):
            if not is_there(one) and not self.is_pinned(one):
                raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")

    def launch(self, call, *given):
        """A kernel: at once, or whenever the graph is replayed; a capture does not run it."""
        self.require_reach(given)
        call() if self.captured is None else self.captured.append((call, None))


PRETENCE = Pretence()


def registered(tensor):
    """Page-locked by the driver itself."""
    from ess.kernels.cuda.driver import attempt

    if not tensor.numel() or is_there(tensor):
        return False
    with torch._C.DisableTorchFunction():
        ends = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size() - 1
    return all(attempt("cuMemHostGetDevicePointer", end, 0)[0] == 0 for end in ends)


class Stream(contextlib.nullcontext):
    cuda_stream, device = 0, DEVICE

    def __init__(self, device=None):
        super().__init__()

    def wait_stream(self, other):
        assert isinstance(other, Stream)

    def wait_event(self, event):
        assert isinstance(event, Event)

    def synchronize(self):
        synchronize()


class Event:
    def __init__(self, enable_timing=False):
        self.timed, self.call_count = enable_timing, 0

    def record(self, stream=None):
        assert stream is None or isinstance(stream, Stream)
        self.moment, self.call_count = PRETENCE.moment, PRETENCE.call_count

    def elapsed_time(self, end):
        assert self.timed, "both events must be created with argument 'enable_timing=True'"
        assert end.timed
        return 0.25 + 1e-3 * (end.call_count - self.call_count)

    def synchronize(self):
        if self.moment == PRETENCE.moment:
            return synchronize()
        PRETENCE.waited["an earlier moment"] += 1


def synchronize(device=None):
    PRETENCE.refuse("synchronize")


@contextlib.contextmanager
def without_waits():
    before, PRETENCE.may_wait = PRETENCE.may_wait, False
    try:
        yield
    finally:
        PRETENCE.may_wait = before


class CUDAGraph:
    def capture_begin(self, pool=None, capture_error_mode="global"):
        assert PRETENCE.captured is None, "one capture at a time"
        PRETENCE.captured = self.calls = []

    def capture_end(self):
        PRETENCE.captured = None

    def replay(self):
        with torch._C.DisableTorchFunction():
            for call, held in self.calls:
                for old, new in zip(tensors(held), tensors(call()), strict=False):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@contextlib.contextmanager
def graph(made, stream=None):
    made.capture_begin()
    try:
        yield
    finally:
        made.capture_end()


def interpret(function, *args, grid, warmup, **kwargs):
    """As on a device, but that the interpreter has its own reading of e4m3 and no bfloat16."""
    instead = {"INTERPRETED": True, "IN_BF16": False}
    given = kwargs | {name: instead[name] for name in instead if name in kwargs}

    def call():
        with torch._C.DisableTorchFunction():
            __name__ == "__main__" or RUN(function, *args, grid=grid, warmup=warmup, **given)

    PRETENCE.launch(call, args)


def begin():
    """From here on there is a device, for this process."""
    home = Path(os.environ.setdefault("ESS_EMULATED", tempfile.mkdtemp()))
    emulated_driver.build_driver(home)
    emulated_driver.begin(alone=False)
    import triton.experimental.gluon  # cannot be imported after the next line but one

    from ess.kernels.cuda.triton import copy, ops  # noqa: F401  their kernels are interpreted
    from ess.pool.lru import cuda_shape

    # All that crosses warps and tiles happens in two warps; a thread of a block costs a fiber.
    cuda_shape.PHASE_THREADS = cuda_shape.TOGETHER_THREADS = 64

    triton.knobs.runtime.interpret = False
    InterpretedFunction.run = interpret
    queue_at_once()
    properties = SimpleNamespace(multi_processor_count=132, name="pretended")
    for name, thing in {
        "Stream": Stream, "Event": Event, "CUDAGraph": CUDAGraph, "graph": graph,
        "stream": contextlib.nullcontext, "device": lambda _: contextlib.nullcontext(),
        "current_stream": lambda _=None: Stream(), "synchronize": synchronize,
        "is_available": lambda: True, "is_current_stream_capturing": capturing,
        "get_device_capability": lambda _=None: (9, 0),
        "get_device_name": lambda _=None: "pretended",
        "get_device_properties": lambda _=None: properties, "device_count": lambda: 1,
        "current_device": lambda: 0, "empty_cache": lambda: None, "set_device": lambda _: None,
        "graph_pool_handle": lambda: (0, 1), "memory_reserved": lambda _=None: 0,
    }.items():  # fmt: skip
        setattr(torch.cuda, name, thing)
    PRETENCE.__enter__()


def capturing():
    return PRETENCE.captured is not None


def queue_at_once():
    """What is queued on torch's stream is done at once, as torch's own work is, and what is
    queued on any stream while a graph is captured becomes part of it."""
    from ess.kernels.cuda import driver, streams

    launch, attempt = driver.Kernel.launch, driver.attempt

    def finish(stream):
        if stream == Stream.cuda_stream:
            event = driver.attempt_now("cuEventCreate", 0)[1]
            driver.attempt_now("cuEventRecord", event, stream)
            while driver.attempt_now("cuEventQuery", event)[0] == driver.NOT_READY:
                pass

    def queue(call, stream):
        def now():
            result = call()
            finish(stream)
            return result

        if PRETENCE.captured is None:
            return now()
        PRETENCE.captured.append((now, None))
        return (0,)

    def launch_and_wait(kernel, record, *, stream, **shape):
        copied = type(record).from_buffer_copy(record)
        queue(lambda: launch(kernel, copied, stream=stream, **shape), stream)

    def attempt_and_wait(name, *given):
        if name in BLOCKING:
            PRETENCE.refuse(name)
        if name == "cuEventRecordWithFlags":  # external: for graphs, which record it again
            assert PRETENCE.captured is not None, "an external event, and nothing is captured"
            name, given = "cuEventRecord", given[:2]
        if name not in STREAM_OF:
            return attempt(name, *given)
        return queue(lambda: attempt(name, *given), given[STREAM_OF[name]])

    def spin(event, timeout_s=None):
        PRETENCE.refuse("CudaEvent.wait")
        wait(event, timeout_s)

    wait, streams.CudaEvent.wait = streams.CudaEvent.wait, spin
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

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
