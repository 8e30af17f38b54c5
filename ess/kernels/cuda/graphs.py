"""Work of a stream, recorded once and replayed whole: one submission instead of many."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ess.errors import BadState
from ess.kernels.cuda.driver import Device, attempt, call, enumerated

RELAXED: Final = ("CUstreamCaptureMode", "CU_STREAM_CAPTURE_MODE_RELAXED")


class CudaGraph:
    """Records are copied at the capture; the memory that they name must outlive the graph."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._executable: int | None = None

    @contextmanager
    def capture(self, stream: int) -> Iterator[None]:
        """What the body queues on `stream` becomes the graph and does not run."""
        if self._executable is not None:
            raise BadState("this graph has been captured already: make another")
        self._device.make_current()
        call("cuStreamBeginCapture", stream, enumerated(*RELAXED))
        try:
            yield
        finally:
            graph = call("cuStreamEndCapture", stream)
        self._executable = int(call("cuGraphInstantiate", graph, 0))
        call("cuGraphDestroy", graph)
        weakref.finalize(self, _destroy, self._device, self._executable)

    def launch(self, stream: int) -> None:
        if self._executable is None:
            raise BadState("this graph is empty: capture something first")
        self._device.make_current()
        call("cuGraphLaunch", self._executable, stream)


def _destroy(device: Device, executable: int) -> None:
    attempt("cuCtxSetCurrent", device.context)
    attempt("cuGraphExecDestroy", executable)
