"""The copy lane of a device door: copies queued behind compute, and marks that the host looks at.

Nothing that a step queues is a job of the host: lists and counts of its copies lie on the device.
`StepFetches` queues them on the lane's stream behind what compute has queued so far, and records an
event that compute waits for where it needs the rows. The host looks at marks between steps, to
learn what has landed; a mark covers compute and the copies of steps. Landings, which fill slots
ahead of selections, have a stream of their own, so that no fetch of a step queues behind them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ess.errors import BadState
from ess.flashtrans.mover import RowMover
from ess.kernels.cuda.driver import shared_device
from ess.kernels.cuda.rows import COPY_BLOCKS
from ess.kernels.cuda.streams import CudaEvent, CudaStream, let_go
from ess.kernels.streams import RowCopy

Cuda: Any = torch.cuda


class DeviceLane:
    def __init__(self, ordinal: int) -> None:
        self.device = shared_device(ordinal)
        self.home = torch.device("cuda", ordinal)
        self.mover = RowMover(self.device, block_count_max=COPY_BLOCKS)
        self.steps = CudaStream(self.device, priority=-1)
        self.landings = CudaStream(self.device)
        self.keys_under_way = False
        self._fork = CudaEvent(self.device)
        self._kept: deque[tuple[CudaEvent, object]] = deque()
        self._is_open = True
        weakref.finalize(self, let_go, self.device, self._kept)

    @property
    def compute(self) -> int:
        """The stream that the caller queues its kernels on."""
        return int(Cuda.current_stream(self.home).cuda_stream)

    @property
    def is_captured(self) -> bool:
        """Whether what is queued on compute now becomes part of a graph."""
        with Cuda.device(self.home):  # which need not be the current one
            return bool(Cuda.is_current_stream_capturing())

    def follow(self, stream: CudaStream) -> None:
        """What is queued on the stream from now on runs behind what compute has queued so far."""
        self._fork.record(self.compute).hold(stream.handle)

    def submit(self, copies: Sequence[RowCopy]) -> CudaEvent:
        """Queues copies between steps, behind compute; compute does not wait for them."""
        if not self._is_open:
            raise BadState("the lane is closed: it takes no more copies")
        self.follow(self.steps)
        event = CudaEvent(self.device)
        prepared = self.mover.prepare(copies)
        prepared.queue(self.steps.handle, then=event)
        self.keep(prepared, event)
        return event

    def keep(self, what: object, until: CudaEvent) -> None:
        """Keeps torch from reusing this memory while one of our streams reads it."""
        while self._kept and self._kept[0][0].done():
            self._kept.popleft()
        self._kept.append((until, what))

    def mark(self) -> CudaEvent:
        """An event that passes when compute and the lane of steps have done what is queued now.

        This leaves out landings, for which all that follows on either stream would wait. Pages may
        go while a landing still reads them on the host, for it fills slots that these rows have
        left or will leave, and `Leaving` keeps such slots until it has ended."""
        self.follow(self.steps)
        return self.steps.record()

    def hold_compute(self) -> None:
        """Compute waits for what is queued on the lane of steps."""
        self._fork.record(self.steps.handle).hold(self.compute)

    def hold_for_copies(self) -> None:
        """Compute waits for what is queued on both lanes."""
        self.hold_compute()
        CudaEvent(self.device).record(self.landings.handle).hold(self.compute)

    def hold_for_keys(self) -> None:
        """Compute waits for index keys that are on their way, if there are any."""
        if self.keys_under_way:
            self.hold_compute()
            self.keys_under_way = False

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.landings.synchronize()
            self.mark().wait()
