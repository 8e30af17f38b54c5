"""Tensors from one rank to another over torch.distributed, one process group per direction.

torch.distributed leaves two things to its callers. They must know the size of a message before they
receive it, as gloo ends the process when more comes. And they must never leave a rank waiting for a
dead peer: NCCL waits for ever, gloo too if the peer is only stopped. `wake` ends such a wait.

    on CPU   gloo. A receive that times out breaks the connection of its pair and thereby ends every
             other wait on it: this is how `wake` works; `abort` does nothing there. It does not end
             a receive whose sender died in the middle of a tensor: gloo no longer tracks that
             receive, and only its own timeout ends it. A separate thread waits in it, and no other
             thread waits for that thread.
    on CUDA  NCCL, on a stream of the waiting thread's own. The thread asks the device whether the
             receive has ended, and `is_over` whether it ever will.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from struct import Struct
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ess.comm.link import DIMS_MAX, TENSOR_BYTES_MAX
from ess.errors import BadInput, BadState, Unavailable

DTYPES: Final = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
_SHAPE: Final = Struct("<BBH4Q")
SHAPE_BYTES: Final = _SHAPE.size
_BREAK_TAG: Final = 1
_BREAK_WAIT: Final = timedelta(milliseconds=1)
_POLL_S: Final = 50e-6
NCCL_S: Final = 3600.0


def pack_shape(tensor: Tensor | None) -> bytes:
    """A header of fixed size for a tensor's shape; no dimensions mean no tensor."""
    if tensor is None:
        return _SHAPE.pack(0, 0, 0, 0, 0, 0, 0)
    if tensor.dtype not in DTYPES:
        raise BadInput(f"tensor has the dtype {tensor.dtype}, which no link carries")
    sizes = [*tensor.shape, *[0] * (DIMS_MAX - tensor.dim())]
    return _SHAPE.pack(DTYPES.index(tensor.dtype), tensor.dim(), 0, *sizes)


def unpack_shape(header: bytes) -> tuple[torch.dtype, list[int]] | None:
    """BadInput unless it describes no tensor, or one of at most TENSOR_BYTES_MAX bytes."""
    kind, dims, zero, *sizes = _SHAPE.unpack(header)
    if not dims and not any((kind, zero, *sizes)):
        return None
    if kind >= len(DTYPES) or not 1 <= dims <= DIMS_MAX or zero or any(sizes[dims:]):
        raise BadInput(f"no tensor has kind {kind}, {dims} dimensions and sizes {sizes}")
    size = math.prod(sizes[:dims]) * DTYPES[kind].itemsize
    if size > TENSOR_BYTES_MAX:
        raise BadInput(f"a tensor of {size} bytes, at most {TENSOR_BYTES_MAX}")
    return DTYPES[kind], sizes[:dims]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class TensorWay(Protocol):
    """A direction: rank 0 of its process group sends, rank 1 receives."""

    def post(self, content: Tensor) -> Callable[[], object]:
        """Begins to send; the returned function waits until the send has ended."""

    def receive(self, content: Tensor, is_over: Callable[[], bool]) -> None: ...

    def wake(self) -> None: ...


class GlooWay:
    def __init__(self, group: Any, *, patience_s: float) -> None:
        self._group = group
        self._patience = timedelta(seconds=patience_s)

    def post(self, content: Tensor) -> Callable[[], object]:
        work = self._group.send([content], 1, 0)
        return lambda: (work.wait(), content)

    def receive(self, content: Tensor, is_over: Callable[[], bool]) -> None:
        self._group.recv([content], 0, 0).wait(self._patience)

    def wake(self) -> None:
        break_waits(self._group)


class NcclWay:
    """Not run by any test here: NCCL needs a GPU for every rank."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def post(self, content: Tensor) -> Callable[[], object]:
        work = self._group.send([content], 1, 0)
        return lambda: (work.wait(), content)

    def receive(self, content: Tensor, is_over: Callable[[], bool]) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._group.recv([content], 0, 0).wait()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
            while not done.query():  # type: ignore[no-untyped-call]
                if is_over():
                    raise BadState("the group ended while a tensor was awaited")
                time.sleep(_POLL_S)

    def wake(self) -> None:
        self._group.abort()


def break_waits(group: Any) -> None:
    """Ends all waits on a gloo group, here and on its other ranks."""
    for rank in range(group.size()):
        if rank != group.rank():
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], rank, _BREAK_TAG).wait(_BREAK_WAIT)


def gloo_group(
    store: Any, rank: int, size: int, *, host: str, timeout_s: float, patience_s: float
) -> Any:
    """All its ranks call this at once; they connect from the address of `host` within `timeout_s`.
    A later exchange has `patience_s`, of which gloo itself must know: it would end each exchange
    after the time that was left to connect in."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    made = dist.ProcessGroupGloo(store, rank, size, options)
    made._set_default_timeout(timedelta(seconds=patience_s))
    return made


def nccl_group(store: Any, rank: int, size: int, *, device: torch.device) -> Any:
    """NCCL's own watch ends the process, without a word; `wake` comes long before it does.

    NCCL may register buffers while a graph is captured. That meets all ranks on the host, and a
    rank that replays its graph never comes there. We register none, so nothing is lost."""
    if not dist.is_nccl_available():
        raise Unavailable("this torch has no NCCL: tensors on CUDA cannot travel between ranks")
    torch.cuda.set_device(device)
    os.environ.update(NCCL_GRAPH_REGISTER="0", NCCL_LOCAL_REGISTER="0")
    os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "0")  # a stack trace for each exchange
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=NCCL_S)
    return dist.ProcessGroupNCCL(store, rank, size, options)
