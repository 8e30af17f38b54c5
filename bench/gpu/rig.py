"""Timing on a device: events around work that is already queued, graphs where launches are short.

A gate holds the stream while the host queues: the first event, the work and the last event then run
without the host, and no launch is in the time. Every row says that it was measured; what a model
says is a row of its own that says so.

Rows have the form of ess.bench.harness.report, but neither its packages nor torch are needed: a
machine with a GPU runs this from a bare checkout.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from ess.kernels.cuda.driver import Device
from ess.kernels.cuda.graphs import CudaGraph
from ess.kernels.cuda.pinned import pinned_memory
from ess.kernels.cuda.program import Program
from ess.kernels.cuda.streams import CudaEvent, CudaStream

Row = dict[str, Any]
WARMUPS: Final = 2
GATE: Final = Program(file="gate.cu")
GATE_LIMIT_NS: Final = 200_000_000


class GateRecord(ctypes.Structure):
    """Gate of csrc/flashtrans/gate.cu."""

    _fields_ = (("opened", ctypes.c_void_p), ("limit_ns", ctypes.c_int64))


class Gate:
    """A kernel that waits for the host, which opens the gate when all is queued behind it."""

    def __init__(self, device: Device) -> None:
        self._word = pinned_memory(device, 4).view(np.int32)
        self._kernel = device.kernel(GATE, "ess_gate")
        self._record = GateRecord(self._word.ctypes.data, GATE_LIMIT_NS)

    def close(self, stream: int) -> None:
        self._word[0] = 0
        self._kernel.launch(self._record, blocks=1, threads=1, stream=stream)

    def open(self) -> None:
        self._word[0] = 1


class GpuRig:
    def __init__(self, *, repeats: int) -> None:
        self.device = Device()
        self.stream = CudaStream(self.device)
        self.repeats = repeats
        self.gate = Gate(self.device)

    def graph_us(self, queue: Callable[[int], None], turns: int) -> list[float]:
        """Microseconds of one of `turns` calls in one graph; each call gets its number and other
        inputs."""
        graph = CudaGraph(self.device)
        with graph.capture(self.stream.handle):
            for turn in range(turns):
                queue(turn)
        each = self.us(lambda: graph.launch(self.stream.handle))
        return [us / turns for us in each]

    def us(
        self,
        run: Callable[[], None],
        prepare: Callable[[], None] | None = None,
        *,
        gated: bool = True,
    ) -> list[float]:
        """Between two events on the stream, work queued in between; warm-ups are thrown away.

        Not `gated`: with the time that the host takes to queue it, for work of more launches than a
        stream has room for.
        """
        taken = []
        for _ in range(WARMUPS + self.repeats):
            if prepare is not None:
                prepare()
            if gated:
                self.gate.close(self.stream.handle)
            begin = self.stream.record()
            run()
            end = self.stream.record()
            self.gate.open()
            end.wait(60)
            taken.append(end.us_since(begin))
        return taken[WARMUPS:]

    def event(self) -> CudaEvent:
        return CudaEvent(self.device)


def rate_row(
    name: str,
    us: Sequence[float],
    byte_count: int,
    *,
    baseline: tuple[str, float] | None = None,
    target: float | None = None,
    **config: Any,
) -> Row:
    """GB/s, the more the better; `target` is the least ratio to the baseline."""
    samples = [byte_count / taken_us / 1e3 for taken_us in us]
    return row(name, "GB/s", samples, baseline=baseline, target=target, higher=True, **config)


def row(
    name: str,
    unit: str,
    samples: Sequence[float],
    *,
    baseline: tuple[str, float] | None = None,
    target: float | None = None,
    higher: bool = False,
    **config: Any,
) -> Row:
    value = statistics.median(samples)
    ratio = None
    if baseline is not None:
        ratio = value / baseline[1] if higher else baseline[1] / value
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "baseline": baseline and baseline[0],
        "baseline_value": baseline and baseline[1],
        "ratio": ratio,
        "target": target,
        "met": None if target is None or ratio is None else ratio >= target,
        "config": {"kind": "measured"} | config,
        "samples": list(samples),
    }


def median_rate(us: Sequence[float], byte_count: int) -> float:
    return byte_count / statistics.median(us) / 1e3
