"""A stage that records the time of each layer of each micro-batch."""

from __future__ import annotations

import itertools
import time
from io import FileIO

import msgspec
from torch import Tensor

from ess.clock import RealClock
from ess.engine.step.runner import Runner
from ess.prefill.orders import Order, Run
from ess.prefill.stage import Stage
from ess.prefill.trial.pipe_messages import Line, Timed


class TimedStage(Stage):
    """Call `follow` once its `between` is set: it reads the clocks between layers."""

    def __init__(self, runner: Runner, log: FileIO) -> None:
        super().__init__(runner, port=None, clock=RealClock())
        self._log = log
        self._marks: list[tuple[float, float]] = []

    def follow(self) -> None:
        before = self.between

        def between() -> None:
            self._mark()
            before()

        self.between = between

    def _mark(self) -> None:
        self._marks.append((time.monotonic(), time.thread_time()))

    def obey(self, order: Order, hidden: Tensor | None = None) -> Tensor | None:
        if not isinstance(order, Run):
            return super().obey(order, hidden)
        self._marks.clear()
        self._mark()
        made = super().obey(order, hidden)
        self._mark()
        walls, cores = zip(*self._marks, strict=True)
        self.write(
            Timed(
                chunks=[(part.start, part.stop) for part in order.parts],
                wall_s=_steps(walls),
                core_s=_steps(cores),
            )
        )
        return made

    def write(self, line: Line) -> None:
        self._log.write(msgspec.json.encode(line) + b"\n")


def _steps(times: tuple[float, ...]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]
